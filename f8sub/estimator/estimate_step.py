"""f8sub.estimate_step: a training step's time on many GPUs, and what float8 adds to it part by part."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from f8sub.convert.class_swap import EXPERTS
from f8sub.errors import Float8ConfigError, unknown
from f8sub.estimator.advice import fits, one_of
from f8sub.estimator.cluster import (
    E4M3,
    FLOAT32,
    H100_500W,
    REDUCTIONS,
    Arm,
    Cluster,
    Group,
    Timeline,
    divided,
    group_of,
    timeline,
)
from f8sub.estimator.experts import decided
from f8sub.estimator.gpus import GPUS, Gpu, gpu_of
from f8sub.estimator.memory import memory
from f8sub.estimator.models import named_or_given
from f8sub.estimator.page import step_page
from f8sub.estimator.seconds import (
    CHECKPOINTS,
    LOGIT_BYTES,
    SELECTIVE,
    Run,
    rest_of,
    wire,
)
from f8sub.estimator.shapes import Product, Shapes, shapes_of
from f8sub.experts.seams import refuse_unknown_experts
from f8sub.recipe import Recipe, get_recipe
from f8sub.recipes import DEFAULT

KINDS = {**GPUS, H100_500W.name: H100_500W}
"""GPUs by name; the last one is that of published runs."""

BF16_WAY, COMPUTE = "bf16", "float8 compute"
BY_WEIGHT, GATHERS = "+ float8 all-gather, a scale at a time", "+ one all-reduce of all scales"
"""The first ways to train, each with what the one before has."""


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """One way to train on so many GPUs.

    Attributes:
        gpus: how many.
        way: what is in float8, added to the ways before.
        seconds: of a step.
        tokens_per_second: of a GPU.
        over_bf16: speed as a multiple of bf16's.
        timeline: what of the step is compute, waiting, and slowed by collectives.
        loss: seconds of softmax and cross entropy.
        optimizer: seconds of AdamW and of the all-reduce of scales.
        fits: whether a GPU's memory holds it.
    """

    gpus: int
    way: str
    seconds: float
    tokens_per_second: float
    over_bf16: float
    timeline: Timeline
    loss: float
    optimizer: float
    fits: bool


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """What is predicted. ``str()`` is a table, ``as_dict()`` is for JSON.

    Attributes:
        title: the model's class.
        shapes: what was read of the model.
        clusters: one for each number of GPUs.
        run: how it is trained, on the first of them.
        recipe: the recipe's name.
        reduction: how gradients are reduced but in the last way.
        predictions: every way on every number of GPUs.
        native: whether the recipe has kernels on the GPU; else its products are those of the reference backend.
    """

    title: str
    shapes: Shapes
    clusters: tuple[Cluster, ...]
    run: Run
    recipe: str
    reduction: str
    predictions: tuple[StepPrediction, ...]
    native: bool

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways to train, in their order."""
        return tuple(dict.fromkeys(each.way for each in self.predictions))

    def of(self, gpus: int, way: str) -> StepPrediction:
        """One prediction; Float8ConfigError where there is none, which lists those that there are."""
        return one_of(self.predictions, gpus=gpus, way=way)

    def as_dict(self) -> dict[str, Any]:
        """All figures, in seconds and ratios, as JSON takes them."""
        first = self.clusters[0]
        return {
            "title": self.title,
            "parameters": self.shapes.parameters,
            "gpu": first.gpu.name,
            "gpus_per_host": first.per_host,
            "network_gbit": first.network / 1e9,
            "replicas": first.replicas,
            "tensor_parallel": first.parts,
            "tokens": self.run.tokens,
            "sequence": self.run.sequence,
            "checkpoint": self.run.checkpoint,
            "recipe": self.recipe,
            "reduction": self.reduction,
            "native": self.native,
            "predictions": [asdict(each) for each in self.predictions],
        }

    def __str__(self) -> str:
        return step_page(self)


def estimate_step(  # noqa: PLR0913  (a model, a cluster, and how it is trained)
    model: torch.nn.Module | str,
    gpus: int | Sequence[int] = (8, 64, 128, 1024),
    *,
    gpu: str = "H100",
    gpus_per_host: int = 8,
    network: float = 400,
    tokens: int = 8192,
    sequence: int | None = None,
    replicas: int = 1,
    tensor_parallel: int = 1,
    recipe: str | Recipe = DEFAULT,
    reduction: str = FLOAT32,
    checkpoint: str = SELECTIVE,
    skip: str | Sequence[str] = (),
    experts: bool | str = EXPERTS,
) -> StepEstimate:
    """Predict a step's time under FSDP2 on several numbers of GPUs; the model is read, not changed.

    Compute is ``f8sub.estimate``'s. All-gathers and reductions take their bytes over NVLink and over the hosts'
    NICs, and hide behind compute as FSDP2 lets them: one block is gathered ahead, gathers and reductions queue.

    Args:
        model: on any device, meta included; converted or not. Or what ``python -m f8sub estimate`` takes for it, such
            as "llama3-8b".
        gpus: how many, or several such numbers.
        gpu: "H200", "H100", "B200", or "H100-500W", which published runs had.
        gpus_per_host: that NVLink joins.
        network: Gbit/s of a GPU's NIC.
        tokens: of a data-parallel rank in a step.
        sequence: tokens that attend to each other; None for ``tokens``.
        replicas: copies of the weights, for HSDP.
        tensor_parallel: GPUs that share each layer.
        recipe: a name or a recipe.
        reduction: of gradients but in the last way, which has e4m3: "float32", as torchtitan, "bf16", "e4m3" or
            "e4m3-flat", which is one exchange over all hosts.
        checkpoint: "none", "selective", "gemms" or "full".
        skip: glob patterns of layers that stay in high precision.
        experts: whether experts of a mixture are converted, as for ``convert_to_float8``.

    Raises:
        Float8ConfigError: an unknown GPU, recipe, policy or reduction, a size that is no positive number, GPUs that
            replicas and tensor parallelism do not divide, or a model without numbered blocks.
    """
    kind = gpu_of(gpu, KINDS)
    if reduction not in REDUCTIONS:
        raise unknown("reduction", reduction, REDUCTIONS)
    if checkpoint not in CHECKPOINTS:
        raise unknown("checkpoint policy", checkpoint, CHECKPOINTS)
    counts = (gpus,) if isinstance(gpus, int) else tuple(gpus)
    sequence = tokens if sequence is None else sequence
    clusters = tuple(
        _cluster(kind, count, gpus_per_host, network, replicas, tensor_parallel) for count in counts
    )
    if not clusters or min(tokens, sequence) < 1 or sequence > tokens:
        raise Float8ConfigError(
            f"give one number of GPUs or more, and tokens that hold a sequence; got gpus={gpus}, tokens={tokens}, "
            f"sequence={sequence}"
        )
    refuse_unknown_experts(experts, None)
    model = named_or_given(model)
    chosen = get_recipe(recipe)
    shapes = shapes_of(model, [skip] if isinstance(skip, str) else skip, experts)
    shapes = decided(shapes, chosen, kind, tokens)
    if not shapes.blocks:
        raise Float8ConfigError("the model has no numbered blocks, which fully_shard gathers in turn")
    run = Run(tokens, sequence, clusters[0].shards, replicas, checkpoint)
    found: list[StepPrediction] = []
    for cluster in clusters:
        own = [
            _predict(shapes, name, arm, cluster, replace(run, shards=cluster.shards))
            for name, arm in _ways(shapes, chosen, reduction, run)
        ]
        found += [replace(each, over_bf16=own[0].seconds / each.seconds) for each in own]
    native = all(map(kind.is_native, (chosen.fprop, chosen.dgrad, chosen.wgrad)))
    title = type(model).__name__
    return StepEstimate(title, shapes, clusters, run, chosen.name, reduction, tuple(found), native)


def _cluster(gpu: Gpu, gpus: int, per_host: int, network: float, replicas: int, parts: int) -> Cluster:
    counts = {"gpus": gpus, "gpus_per_host": per_host, "replicas": replicas, "tensor_parallel": parts}
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise Float8ConfigError(
                f"{name} (--{name.replace('_', '-')}) is a whole number from 1 on, got {count!r}"
            )
    if not network > 0:
        raise Float8ConfigError(f"network (--network) is more than 0 Gbit/s, got {network!r}")
    made = Cluster(gpu, gpus, per_host, network * 1e9, replicas, parts)
    if gpus % (replicas * parts) or made.shards % made.neighbours or parts > per_host:
        raise Float8ConfigError(
            f"{gpus} GPUs on hosts of {per_host} do not divide into replicas={replicas} and tensor_parallel={parts}: "
            "GPUs that share a layer lie on one host, and a copy of the weights within one host or on whole ones; take "
            "another number of GPUs, or say how many a host has (gpus_per_host, --gpus-per-host)"
        )
    return made


def _ways(shapes: Shapes, recipe: Recipe, reduction: str, run: Run) -> list[tuple[str, Arm]]:
    made = [
        (BF16_WAY, Arm(reduction=reduction)),
        (COMPUTE, Arm(recipe, gathers=False, reduction=reduction)),
        (BY_WEIGHT, Arm(recipe, scales_by_weight=True, reduction=reduction)),
        (GATHERS, Arm(recipe, reduction=reduction)),
    ]
    if not wire(shapes, recipe, run).amaxes:  # scales that stay in their rows travel with the codes
        made[2:] = [("+ float8 all-gather", Arm(recipe, reduction=reduction))]
    if reduction == FLOAT32:
        made.append(("  gradients in bf16 instead", Arm(recipe, reduction="bf16")))
    return made if reduction == E4M3 else [*made, ("+ gradients in e4m3", Arm(recipe, reduction=E4M3))]


def _predict(shapes: Shapes, way: str, arm: Arm, cluster: Cluster, run: Run) -> StepPrediction:
    part = divided(shapes, cluster.parts)
    groups: dict[tuple[Product, ...], Group] = {}
    blocks = []
    for products in part.blocks.values():
        key = tuple(replace(p, fqn="", reads=str(p.shares_x), block="") for p in products)
        if key not in groups:
            groups[key] = group_of(products, arm, cluster, run, outside=False)
        blocks.append(groups[key])
    outside = group_of([*part.outside, *rest_of(part)], arm, cluster, run, outside=True)
    found = timeline(blocks, outside)
    loss = run.tokens * part.logits * LOGIT_BYTES / cluster.gpu.copy
    optimizer = part.learning / cluster.shards * run.master_bytes * run.optimizer_passes / cluster.gpu.copy
    if arm.recipe is not None and arm.gathers and not arm.scales_by_weight:
        optimizer += cluster.latency
    total = found.forward + found.backward + loss + optimizer
    holds = fits(memory(part, arm.recipe, run), cluster.gpu)
    speed = run.tokens / cluster.parts / total
    return StepPrediction(cluster.gpus, way, total, speed, 1.0, found, loss, optimizer, holds)
