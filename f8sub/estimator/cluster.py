"""Predicts FSDP2's collectives over GPUs on hosts, and when those and compute begin and end in a step.

[Note] FSDP2 gathers a block while the one before it computes, and no more: a gather begins when the block before
begins. In backward a block's gradients are reduced while the next block computes, before that one's prefetch; gathers
and reductions share a communicator, and so queue. A block's backward ends no sooner than the reduction before it, whose
buffer it takes. What is outside of blocks is gathered first and reduced last, beside nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from f8sub.convert.products import Product, Shapes
from f8sub.estimator import seconds
from f8sub.estimator.gpus import H100, H200, Gpu
from f8sub.estimator.seconds import NONE, Run, Seconds

if TYPE_CHECKING:
    from f8sub.recipe import Recipe

LINK = 2.3
"""A GPU's bytes/s in a collective by itself, as a multiple of ``Gpu.link``, which is fitted to those that products run
beside: two H200s had 0.27 to 0.30 TB/s, as ``scripts/bench/gradients.py`` measures it."""

NETWORK = 0.75
"""Share of a NIC's rate that large collectives reach: assumed, see "What is not measured" in docs/measurements."""

STEP, STEP_OF_NETWORK, LAUNCHED = 3.4e-6, 14e-6, 8.4e-6
"""Seconds of a step of a collective within a host and between hosts, and of a collective without its steps. Source: the
model by which NCCL itself chooses, NVLINK, NET and the base of its protocol Simple (``src/graph/tuning.cc``)."""

MOST_STEPS = 4e-4
"""Seconds of all steps, NCCL having trees for many ranks. Fitted to the published run of Llama 3 405B, 256 GPUs
(``scripts/tables/published_runs.json``), whose speed-up is predicted 6.8 % too low with it and 7.2 % without."""

CODE = 1 + 1 / 128
"""Bytes of a gradient's element as e4m3 with its block's exponent; see ``f8sub.gradients``."""

FLOAT32, BF16, E4M3, E4M3_FLAT = "float32", "bf16", "e4m3", "e4m3-flat"
REDUCTIONS = {FLOAT32: 4.0, BF16: 2.0, E4M3: CODE, E4M3_FLAT: CODE}
"""How gradients are reduced: rings of FSDP2 with sums in that dtype, and ``reduce_gradients_in_float8``; bytes."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Describes the ranks of a mesh: shards next to each other, those of tensor parallelism innermost.

    Attributes:
        gpu: the kind of GPU.
        gpus: how many there are.
        per_host: how many of them NVLink joins.
        network: bit/s of a GPU's NIC.
        replicas: copies of the weights, HSDP's.
        parts: GPUs that share a layer, by tensor parallelism.
    """

    gpu: Gpu
    gpus: int
    per_host: int = 8
    network: float = 400e9
    replicas: int = 1
    parts: int = 1

    @property
    def shards(self) -> int:
        """The number of ranks in a shard group."""
        return self.gpus // self.replicas // self.parts

    @property
    def neighbours(self) -> int:
        """The number of a shard group's ranks on one host."""
        # GPUs that share layers are next to each other, and leave a host fewer ranks of a shard group.
        return min(self.shards, max(1, self.per_host // self.parts))

    @property
    def hosts(self) -> int:
        """The number of hosts of a shard group."""
        return self.shards // self.neighbours

    @property
    def link(self) -> float:
        """The bytes/s of a GPU to others of its host, in a collective by itself."""
        return self.gpu.link * LINK

    @property
    def nic(self) -> float:
        """The bytes/s of a GPU to other hosts."""
        # bits to bytes
        return self.network / 8 * NETWORK

    def ring(self, size: float) -> float:
        """Predict the seconds of an all-gather or reduce-scatter of so many bytes in all."""
        away = size * (self.shards - 1) / self.shards
        # Each NIC of a host carries an equal part.
        across = away / self.neighbours / self.nic if self.hosts > 1 else 0.0
        # NVLink and NICs work at once: the slower of both decides.
        return max(away / self.link, across) + self._steps()

    def exchange(self, elements: float, flat: bool) -> float:
        """Predict the seconds of the exchange of e4m3 data; over several hosts in two hops, bfloat16 within one."""
        if self.hosts == 1:
            return elements * CODE * (self.shards - 1) / self.shards / self.link + self._steps()
        if flat or self.neighbours == 1:
            # Only what leaves the host counts.
            away = (self.shards - self.neighbours) / self.shards
            return elements * CODE * away / self.nic + self._steps()
        # First hop: partial sums in bfloat16 over NVLink. Second hop: e4m3 over the NICs.
        within = elements * 2 * (self.neighbours - 1) / self.neighbours / self.link
        across = elements / self.neighbours * CODE * (self.hosts - 1) / self.hosts / self.nic
        return within + across + self._steps()

    def all_reduce(self, size: float) -> float:
        """Predict the seconds of HSDP's all-reduce of a shard of so many bytes over the replicas."""
        if self.replicas == 1:
            return 0.0
        # Replicas are the outermost dimension of the mesh, so they are on different hosts if there are several.
        rate = self.nic if self.gpus > self.per_host else self.link
        return 2 * size * (self.replicas - 1) / self.replicas / rate + self.latency

    @property
    def latency(self) -> float:
        """The seconds of an all-reduce of few bytes over all GPUs."""
        # Small tensors are reduced in trees: steps grow as the logarithm of the hosts.
        return LAUNCHED + STEP_OF_NETWORK * max(1, (self.gpus // self.per_host).bit_length())

    def _steps(self) -> float:
        if self.hosts == 1:
            return (self.shards - 1) * STEP
        return min((self.hosts - 1) * STEP_OF_NETWORK + (self.shards - self.hosts) * STEP, MOST_STEPS)


_POWER = 0.74
"""Share of what products reach at 700 W; fitted to the published runs of a Llama 3 8B, whose page tells the limit
(``scripts/tables/published_runs.json``)."""

H100_500W = Gpu(
    "H100-500W",
    {kind: rate * _POWER for kind, rate in H100.rates.items()},
    H200.copy * 2.4 / 4.8,
    H100.attention * _POWER,
    H100.link,
    96e9,
    "an H100 of 96 GB and 2.4 TB/s at 500 W, which published runs had; fitted to them",
    grouped=H100.grouped,
)


COPY_IN = {BF16: 5.5, E4M3: 3.1, E4M3_FLAT: 3.1}
"""Bytes of a copy's speed that an element takes into FSDP2's buffer, or as codes into f8sub's: an H200 took 314 us
for the 218 M elements of a Llama 3 8B layer in bf16, an H100 226 us for its codes (``scripts/bench/gradients.py``)."""

ADD = 1.07
"""By how much a copy of the sum's bytes is faster: 903, 463 and 340 us of 856 M elements from 2, 8 and 64 ranks."""

FORWARD = 1 / 3
"""Share of casts and of elementwise work that is forward's: assumed, one of three passes. It moves compute between the
two halves of a step, whose sum it does not change."""

HIDDEN_GATHER, HIDDEN_REDUCTION = 0.115, 0.4
"""Seconds that a second of a collective within a host adds to what runs beside it: it takes multiprocessors and memory
bandwidth. A sum in a reduce-scatter takes most. Fitted to "Llama 3 8B, 32 layers, 8192 tokens per GPU, torchtitan
0.2.2" of ``tests/estimator/measured.toml``."""

SKEW = 0.05
"""Share of compute by which ranks that share weights wait for the slowest one; fitted to those runs, as the two
above."""

OWN_SCALE = 7 * seconds.CAST_GAP
"""Seconds of the kernels before and after the all-reduce of one weight's amax: counted, those of ``tensor_to_scale`` in
torchao 0.18, which the published runs used."""

TP_COLLECTIVES = 4
"""Collectives of activations of a block's forward under tensor parallelism: counted, two before and two behind
products."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Describes one way to train.

    Attributes:
        recipe: None for bf16.
        gathers: whether weights are gathered as float8 data.
        scales_by_weight: whether each weight's amax has an all-reduce of its own before its gather.
        reduction: one of ``REDUCTIONS``.
    """

    recipe: Recipe | None = None
    gathers: bool = True
    scales_by_weight: bool = False
    reduction: str = FLOAT32


@dataclass(frozen=True, slots=True)
class Group:
    """Holds the seconds of one FSDP2 group.

    Attributes:
        forward: compute, FSDP2's copies included.
        backward: the same.
        gather: one all-gather.
        reduce: the reduce-scatter, or the exchange.
        replicate: the all-reduce over replicas.
        gather_tax: what the all-gather adds to compute beside it.
        reduce_tax: the same of the reduction.
    """

    forward: float
    backward: float
    gather: float
    reduce: float
    replicate: float
    gather_tax: float
    reduce_tax: float


def group_of(
    products: Sequence[Product], arm: Arm, cluster: Cluster, run: Run, *, outside: bool, own: bool
) -> Group:
    """Predict the seconds of a group of products, which are one GPU's part under tensor parallelism.

    What is ``outside`` of blocks is gathered once, not again for backward. See ``seconds.copy_seconds`` for ``own``.
    """
    if cluster.shards == 1 and arm.reduction in (E4M3, E4M3_FLAT):
        arm = replace(arm, reduction=FLOAT32)  # f8sub leaves what one rank has alone
    gpu, recipe = cluster.gpu, arm.recipe
    on_wire = recipe if arm.gathers else None
    compute = computed(products, arm, cluster, run, outside) * (1 + SKEW * (cluster.shards > 1))
    first = forward_of(products, recipe, cluster, run, compute)
    if not run.sharded:
        return Group(first, compute - first, 0.0, 0.0, 0.0, 0.0, 0.0)
    copies = seconds.copy_seconds(products, on_wire, gpu, run, 1 if outside else 2, own=own).copies
    whole = sum(product.elements for product in products if not product.frozen)
    if arm.reduction != FLOAT32:
        # ``copy_seconds`` counts the copy of a float32 reduction.
        counted = sum(p.elements * seconds.copy_in(p, on_wire, own=own) for p in products if not p.frozen)
        copies += (whole * COPY_IN[arm.reduction] - counted) / gpu.copy
    code = sum(product.elements * seconds.code_bytes(product, on_wire) for product in products)
    # Forward copies the gathered weights out of the buffer: one read and one write.
    copy_out = 2 * code / gpu.copy
    gather = cluster.ring(code)
    if arm.scales_by_weight:
        scaled = sum(seconds.wire_format(product, on_wire) is not None for product in products)
        gather += scaled * (OWN_SCALE + cluster.latency)
    reduce, reduce_tax = reduction_of(whole, arm, cluster)
    return Group(
        forward=first + copy_out,
        backward=compute - first + copies - copy_out,
        gather=gather,
        reduce=reduce,
        replicate=cluster.all_reduce(4 * whole / cluster.shards),  # float32
        gather_tax=hidden(HIDDEN_GATHER, code, cluster),
        reduce_tax=reduce_tax,
    )


def computed(products: Sequence[Product], arm: Arm, cluster: Cluster, run: Run, outside: bool) -> float:
    """Predict the seconds of products, casts, attention, elementwise work and tensor parallelism's collectives."""
    gathered = run.sharded and (arm.gathers or arm.recipe is None)
    if outside:
        # Only blocks are checkpointed.
        own = cluster.gpu, replace(run, checkpoint=NONE), False, gathered
        # ``rest_of`` is gathered, and multiplies nothing.
        multiplied = [product for product in products if product.multiplications]
        return sum((seconds.linear_seconds(p, arm.recipe, *own) for p in multiplied), Seconds()).total
    found = seconds.block_seconds(products, arm.recipe, cluster.gpu, replace(run, sharded=gathered))
    compute = found.gemms + found.casts + found.attention + found.elementwise
    return compute + tensor_parallel_seconds(products, cluster, run)


def tensor_parallel_seconds(products: Sequence[Product], cluster: Cluster, run: Run) -> float:
    """Predict the seconds of all-gathers and reduce-scatters of activations in bfloat16, which nothing hides."""
    if cluster.parts == 1 or not products:
        return 0.0
    # activations [tokens, hidden] in bf16, less the part of the GPU itself
    size = 2 * run.tokens * products[0].cols * (cluster.parts - 1) / cluster.parts
    # forward, backward, and forward once more
    passes = 3 if run.checkpoint != NONE else 2
    return passes * TP_COLLECTIVES * size / cluster.link


def forward_of(
    products: Sequence[Product], recipe: Recipe | None, cluster: Cluster, run: Run, compute: float
) -> float:
    """Return forward's part of ``compute``, in seconds: its products, and a share of all else."""
    gemms = sum(seconds.fprop_seconds(product, recipe, run, cluster.gpu) for product in products)
    return gemms + FORWARD * max(0.0, compute - 3 * gemms) / (1 + seconds.REPEATED_ELEMENTWISE)


def reduction_of(elements: float, arm: Arm, cluster: Cluster) -> tuple[float, float]:
    """Predict the seconds of the reduction of a group's gradients, and those that it adds to compute."""
    size = elements * REDUCTIONS[arm.reduction]
    if arm.reduction in (FLOAT32, BF16):
        return cluster.ring(size), hidden(HIDDEN_REDUCTION, size, cluster)
    flat = arm.reduction == E4M3_FLAT
    # The sum reads 1 byte per element, a shard of every rank, and writes a shard in float32.
    adding = elements * (1 + 4 / cluster.shards) * ADD / cluster.gpu.copy
    tax = adding + hidden(HIDDEN_GATHER, size, cluster)
    if cluster.hosts > 1 and cluster.neighbours > 1 and not flat:
        tax += HIDDEN_GATHER * 2 * elements / cluster.link
    return cluster.exchange(elements, flat) + adding, tax


def gathered_seconds(products: Sequence[Product], recipe: Recipe | None, cluster: Cluster, run: Run) -> float:
    """Predict the seconds of FSDP2's copies of some weights, and those that their two all-gathers add to compute."""
    code = sum(product.elements * seconds.code_bytes(product, recipe) for product in products)
    # Others of the model are gathered in float8 whatever these are.
    copies = seconds.copy_seconds(products, recipe, cluster.gpu, run, own=True).copies
    return copies + 2 * hidden(HIDDEN_GATHER, code, cluster)


def hidden(share: float, size: float, cluster: Cluster) -> float:
    """Return the seconds that a collective of ``size`` bytes in all adds to the compute that hides it."""
    return share * size * (cluster.shards - 1) / cluster.shards / cluster.link


def divided(shapes: Shapes, parts: int) -> Shapes:
    """Return the part of a model that one of ``parts`` GPUs has under tensor parallelism.

    In a block, layers that read attention or are the last have their columns divided, others their rows.
    """
    if parts == 1:
        return shapes
    found = []
    last = {products[seconds.last_of(products)].fqn for products in shapes.blocks.values()}
    for product in shapes.products:
        part = replace(product, elements=product.elements // parts)
        edge = "cols" if product.reads_attention or product.fqn in last else "rows"
        found.append(replace(part, **{edge: getattr(product, edge) // parts}))
    whole = shapes.other_parameters, shapes.logits, shapes.other_frozen
    other, logits, fixed = (count // parts for count in whole)
    return Shapes(tuple(found), other, logits, shapes.not_counted, other_frozen=fixed)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Holds the seconds of forward and backward with collectives.

    Attributes:
        forward: until the last block's end.
        backward: from there until the last reduction's end.
        compute: of it, what would remain if collectives took no time.
        waiting: what compute waits for collectives.
        tax: what hidden collectives add to compute.
    """

    forward: float
    backward: float
    compute: float
    waiting: float
    tax: float


NOTHING = Group(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def timeline(blocks: Sequence[Group], outside: Group) -> Timeline:
    """Predict when blocks, in forward's order, and what is outside of them compute, gather and reduce.

    A model without blocks is outside as a whole. The module's note has the rules.
    """
    compute = sum(group.forward + group.backward for group in (*blocks, outside))
    tax = 0.0
    blocks = blocks or [NOTHING]
    # ``now`` is the clock of compute, ``queue`` that of the communicator.
    queue = outside.gather + blocks[0].gather
    now = queue
    for i, block in enumerate(blocks):
        longer = 0.0
        if i + 1 < len(blocks):
            queue = max(queue, now) + blocks[i + 1].gather
            longer = _beside(block.forward, blocks[i + 1].gather, blocks[i + 1].gather_tax)
        tax += longer
        now += block.forward + longer
        # The next block waits for its gather.
        now = max(now, queue)
    forward = now = now + outside.forward
    # The last block is gathered again beside what is outside.
    queue = now + blocks[-1].gather
    now = max(now + outside.backward, queue)
    reduced, replicas = now, now
    for i in reversed(range(len(blocks))):
        # This block was gathered while the one before computed.
        begin = max(now, queue)
        beside, longer = 0.0, 0.0
        if i + 1 < len(blocks):
            # The reduction comes before the prefetch of the next block.
            reduced = max(queue, begin) + blocks[i + 1].reduce
            queue, beside, longer = reduced, blocks[i + 1].reduce, blocks[i + 1].reduce_tax
            # All-reduces over replicas have a communicator of their own.
            replicas = max(replicas, reduced) + blocks[i + 1].replicate
        if i > 0:
            queue = max(queue, begin) + blocks[i - 1].gather
            beside, longer = beside + blocks[i - 1].gather, longer + blocks[i - 1].gather_tax
        longer = _beside(blocks[i].backward, beside, longer)
        tax += longer
        # Its gradients take the buffer of the reduction before, so it ends no sooner than that.
        now = max(begin + blocks[i].backward + longer, reduced)
    queue = max(queue, now) + blocks[0].reduce
    replicas = max(replicas, queue) + blocks[0].replicate
    queue += outside.reduce
    end = max(queue, replicas) + outside.replicate
    return Timeline(forward, end - forward, compute, end - compute - tax, tax)


def _beside(compute: float, collective: float, tax: float) -> float:
    """Return the seconds that a collective adds to compute, which it slows evenly and which may end before it."""
    # The collective ends first: compute bears all of its tax.
    if collective <= compute + tax:
        return tax
    # Else compute is slowed for as long as it runs, t: t = compute + share * t.
    share = tax / collective
    return compute * share / (1 - share)


@dataclass(frozen=True, slots=True)
class Step:
    """Holds the seconds of one training step on every GPU of a cluster.

    Attributes:
        timeline: blocks and what is outside of them, with collectives.
        loss: softmax and cross entropy.
        optimizer: clipping, AdamW, and the all-reduce of scales.
        host: what the host takes to launch all of it from Python.
    """

    timeline: Timeline
    loss: float
    optimizer: float
    host: float

    @property
    def replayed(self) -> float:
        """The seconds of the GPU alone, as where a CUDA graph of the step is replayed."""
        return self.timeline.forward + self.timeline.backward + self.loss + self.optimizer

    @property
    def launched(self) -> float:
        """The seconds of the step as Python launches it: no shorter than the host's time."""
        return max(self.replayed, self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Holds the speed of a step that is replayed, and the host's part of one that is launched.

    Attributes:
        replayed: speed as a multiple of bf16's, both replayed as a CUDA graph by ``f8sub.graph_step``.
        replayed_seconds: seconds of such a step: the GPU's time alone.
        host_seconds: what the host takes to launch the step from Python; a launched step is no shorter.
    """

    replayed: float
    replayed_seconds: float
    host_seconds: float

    @property
    def host_binds(self) -> bool:
        """True if the GPU waits for the host in a launched step."""
        return self.host_seconds > self.replayed_seconds


def sends_codes(shapes: Shapes, arm: Arm) -> bool:
    """Return whether any weight of a model is gathered as float8 data."""
    products = itertools.chain(shapes.outside, *shapes.blocks.values())
    return seconds.sends_codes(products, arm.recipe if arm.gathers else None)


def groups_of(shapes: Shapes, arm: Arm, cluster: Cluster, run: Run) -> list[Group]:
    """Return each block's group, those of equal blocks computed once."""
    own = sends_codes(shapes, arm)
    found: dict[tuple[Product, ...], Group] = {}
    blocks = []
    for products in shapes.blocks.values():
        # Blocks that differ in names alone are equal.
        key = tuple(replace(p, fqn="", reads=str(p.shares_x), block="") for p in products)
        if key not in found:
            found[key] = group_of(products, arm, cluster, run, outside=False, own=own)
        blocks.append(found[key])
    return blocks


def step_of(shapes: Shapes, arm: Arm, cluster: Cluster, run: Run) -> Step:
    """Predict a step: the one engine of ``f8sub.estimate`` and ``f8sub.estimate_step``, for one GPU or many.

    Args:
        shapes: the whole model.
        arm: what is in float8.
        cluster: the GPUs.
        run: how the model is trained; its shards and replicas are the cluster's.
    """
    run = replace(run, shards=cluster.shards, replicas=cluster.replicas)
    part = divided(shapes, cluster.parts)
    blocks = groups_of(part, arm, cluster, run)
    rest = [*part.outside, *seconds.rest_of(part)]
    outside = group_of(rest, arm, cluster, run, outside=True, own=sends_codes(part, arm))
    optimizer = seconds.optimizer_seconds(part.learning, cluster.gpu, run)
    # the one all-reduce of all amaxes, after the optimizer
    if arm.recipe is not None and arm.gathers and not arm.scales_by_weight and cluster.gpus > 1:
        optimizer += cluster.latency
    host = sum(
        seconds.host_seconds(
            block,
            arm.recipe,
            run,
            gathers=arm.gathers,
            in_float8=arm.reduction in (E4M3, E4M3_FLAT) and cluster.shards > 1,
            parts=cluster.parts,
        )
        for block in part.blocks.values()
    )
    loss = seconds.loss_seconds(part.logits, cluster.gpu, run)
    return Step(timeline(blocks, outside), loss, optimizer, host)


def blocks_seconds(shapes: Shapes, arm: Arm, cluster: Cluster, run: Run) -> float:
    """Predict the seconds of all blocks alone, forward and backward, with their collectives."""
    run = replace(run, shards=cluster.shards, replicas=cluster.replicas)
    found = timeline(groups_of(divided(shapes, cluster.parts), arm, cluster, run), NOTHING)
    return found.forward + found.backward
