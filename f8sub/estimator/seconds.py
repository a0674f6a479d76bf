"""Predicts seconds of layers and blocks on one GPU, part by part, from shapes; and of the host that launches them.

A product takes its FLOPs at the rate of its kind, or its bytes at a copy's speed, whichever is longer. A cast takes its
bytes at its share of a copy's speed. Each kernel adds a gap. What remains is attention, elementwise work and FSDP2's
copies. ``f8sub.estimator.cluster`` makes a step of them, on one GPU or many.

Each number names its source. "Fitted to" names sets of ``tests/estimator/measured.toml`` by their titles; the file has
machine, day and command of each figure.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from f8sub.convert.products import GRADIENTS, HEAD_SIZE, RESULT, Product, Shapes
from f8sub.estimator.gpus import (
    FP4,
    H200,
    HIGH,
    MX,
    ROWS,
    SQUARES,
    VECTORS,
    VECTORS_BY_SQUARES,
    WHOLE,
    Gpu,
    kind_of_tiles,
)
from f8sub.estimator.gpus import kind_of_product as kind_of
from f8sub.formats import Float8Format
from f8sub.kernels.grouped.gemm import is_one_by_one
from f8sub.kernels.grouped.operands import stored_format
from f8sub.recipe import HIGH_PRECISION_GEMM as HIGH_GEMM
from f8sub.recipe import GemmSpec, Recipe


class Rate(NamedTuple):
    """Holds the speed of one kind of experts' product on an H200.

    Attributes:
        flops: FLOP/s of a large one.
        written: how many times its results' bytes are written at a copy's speed, after it was multiplied.
    """

    flops: float
    written: float


RATES = {
    HIGH: Rate(800e12, 1),
    ROWS: Rate(1530e12, 1.5),
    VECTORS_BY_SQUARES: Rate(1400e12, 1),
    VECTORS: Rate(970e12, 1),
    WHOLE: Rate(1530e12, 1),
    SQUARES: Rate(1400e12, 1),
}
"""Fitted to "Products of experts by themselves", the 39 with groups of equal size, which they hit within 8 %. Products
of squares alone were not timed: they have the rate of vectors by squares."""

ON = {"H100": {HIGH: 0.96}}
"""Shares of these rates by GPU. An H100's is fitted to the bf16 rows of "Products of Qwen3-30B-A3B's experts by
themselves on an H100", and to the steps of docs/measurements/experts.md on H100s.

Without it those products are predicted 3 % too fast on average, and steps 5 %; float8's products are within 1 %.
"""

READ_AGAIN = 3
"""Bytes moved for each element that the backend ``dequantize`` reads as bf16 before torch multiplies it: counted, 1
read and 2 written."""


def by_expert_seconds(spec: GemmSpec, m: float, k: float, n: float, experts: int, gpu: Gpu) -> float:
    """Predict the seconds of experts' fprop or dgrad: tokens (m, k) by weights (experts, n, k), to (m, n) in bf16."""
    return _seconds(spec, 2 * m * n * k, (m * k, experts * n * k), m * n, gpu)


def over_tokens_seconds(spec: GemmSpec, m: float, n: float, k: float, experts: int, gpu: Gpu) -> float:
    """Predict the seconds of experts' wgrad: (n, m) by (k, m) over each expert's m, to (experts, n, k) in bf16."""
    return _seconds(spec, 2 * m * n * k, (m * n, m * k), experts * n * k, gpu)


def _seconds(spec: GemmSpec, flops: float, read: tuple[float, float], written: float, gpu: Gpu) -> float:
    kind = kind_of(spec)
    # Without a kernel for the kind, operands are dequantized and torch multiplies them in bf16.
    native = kind == HIGH or kind in gpu.grouped
    used = kind if native else HIGH
    rate = RATES[used]
    # ``RATES`` are an H200's: other GPUs differ as they do in plain products.
    of_gpu = rate.flops * gpu.rates[used] / H200.rates[used] * ON.get(gpu.name, {}).get(used, 1.0)
    # bytes per element of a and b
    sizes = [
        2.0 if operand is None or not native else 1 / operand.codes_per_byte for operand in (spec.a, spec.b)
    ]
    moved = sum(elements * size for elements, size in zip(read, sizes, strict=True))
    again = 0.0 if native else sum(read) * READ_AGAIN
    # Results are bf16, 2 bytes per element.
    return max(flops / of_gpu, moved / gpu.copy) + (rate.written * 2 * written + again) / gpu.copy


GAP, CAST_GAP = 5e-6, 9e-6
"""Seconds that a product, and a launch of a cast, take besides: ramps, tails, atomics. The host is ahead.

Fitted to "Small layers, 8192 tokens" and "Products of 64 rows by 8192x8192". Small layers ask for CAST_GAP; with it a
cast by itself is predicted 21 to 39 % too slow (docs/measurements)."""

ELEMENTWISE, ELEMENTWISE_EAGER, ELEMENTWISE_KERNELS, REPEATED_ELEMENTWISE = 8.5, 32, 18, 1 / 3
"""Bytes moved for each element of a layer's x and y: compiled, eager, and eager with a kernel for each norm and SwiGLU;
the share that a repeated forward adds, which is forward's of three passes.

Fitted to the compiled and the eager rows of "Four blocks of a Llama 3 8B under FSDP2", and to "A whole step of 16
blocks, eager, transformers' modules; then Liger-Kernel's norm and SwiGLU".

By the tensors that they read and write, transformers' operators move 106 bytes an element of a norm and 28 of SwiGLU,
forward and backward, kernels such as Liger-Kernel's 10 and 16. That is 14 fewer an element of a Llama's x and y.
"""

LOGIT_BYTES, LOGIT_BYTES_EAGER = 24, 64
"""Bytes that a loss moves for each logit, forward and backward, compiled and eager. Fitted to "The same blocks with
embeddings, head, loss and AdamW: a whole step", and to "A whole step of 16 blocks, eager"."""

ADAMW, CLIPPING = 7, 3
"""Times a parameter's bytes that are moved. Fused AdamW reads parameter, gradient and two states, and writes three.
Clipping reads gradients for their norm, and reads and writes them for their scale."""

COPY_IN = 12
"""Bytes of a copy's speed that a gradient's element takes on its way into the reduction: 6, at half the speed. Fitted
to "Reduce-scatters of a step with 16 layers", row ``copy_in_ms``."""

OWN_COPY_IN = 6.0
"""The same by f8sub's kernel, of a model that it gathers in float8: 12.67 ms for the 8.03e9 elements of a Llama 3 8B,
docs/measurements/several_gpus.md, "Weights gathered in place"."""

UNROUNDED = 2.0
"""The same of a weight that is gathered in float8, whose gradient is reduced where the product writes it: the bytes
that float32 takes more than bf16. With 4 bytes fewer the 7e9 elements of a Llama 3 8B's blocks take 6.5 ms less, where
6.8 were measured; docs/measurements/several_gpus.md, "Gradients reduced in place"."""

OWN_COPIES_OUT = 1
"""Gathers of a step whose weights FSDP2 copies out, of such a model: forward's. For backward they are gathered where
they are read."""

ATTENTION_PASSES = 3.5
"""Of causal attention forward and backward, in forwards: backward has five products where forward has two."""

ROUTED = 52
"""Bytes that an element of a token takes to its expert and back. Fitted to "4 layers of Qwen3-30B-A3B in
recipes/pretrain.py", which had 66 in bf16 and 40 in float8."""

EXPONENTIALS = 3.9e12
"""A Hopper's special functions a second: FlashAttention-3 (arXiv 2407.08608), 2.2. A score needs one in forward and one
in backward, whatever the size of its head, so that small heads are slower a FLOP."""


class Host(NamedTuple):
    """Holds the host's seconds for a step of one compiled block, launched from Python.

    Attributes:
        block: in bf16, layers that stay in high precision included.
        layer: more for each converted weight.
        gathered: of ``layer`` what is only there where FSDP2 gathers codes.
    """

    block: float
    layer: float
    gathered: float = 0.0


HOST = Host(0.0093, 0.00044, 0.00025)
"""Under FSDP2, of blocks with seven layers. bf16: 8.6 and 10.1 ms a block, ``scripts/bench/host_time.py`` on H100s.

float8: 12.4 ms, the median of steps that the host limited: 8.5, 11.5, 12.4, 12.4, 13.8 and 15.2. Four are a Llama 3
8B's with 2048 tokens a GPU (docs/measurements), two a 1B's. Weights that were gathered in bf16 took
13.0 where codes took 15.2.
"""

HOST_RANGE = 0.0085, 0.0152
"""The least and the most of those six for a block in float8."""

HOST_GRADIENTS = 0.00025
"""More for a block whose gradients are reduced in float8: 8.8 ms after 8.5 on one host, 15.4 after 15.2 on another."""

HOST_PARTS = Host(0.0168, 0.00013)
"""The same where GPUs share a layer: 16.8 and 17.7 ms a block of a Llama 3 8B, TP 2 x FSDP 2 (docs/measurements)."""

HOST_ALONE = Host(0.00133, 0.00029)
"""The same without FSDP2, forward and backward: a block took 1.33 ms in bf16 and 3.39 in float8. Source:
docs/measurements/several_gpus.md, "Host time of launched blocks", the machine with prepared launches."""

NONE, SELECTIVE, GEMMS, FULL = "none", "selective", "gemms", "full"
CHECKPOINTS = (NONE, SELECTIVE, GEMMS, FULL)
"""What a checkpointed block makes again in backward: nothing; of products of one shape every second; no product; all.

``SELECTIVE`` and ``GEMMS`` are ``checkpoint_policy("bf16")`` and ``("gemms")``; torchtitan's selective policy repeats
as much as the first.
"""


class Cast(NamedTuple):
    """Holds the cost of a cast by usage: bytes per bf16 element, share of a copy's speed, number of launches."""

    both: tuple[float, float, int]
    row: tuple[float, float, int]
    col: tuple[float, float, int]


CASTS = {
    WHOLE: Cast((6, 0.94, 2), (5, 0.97, 2), (5, 0.96, 2)),
    ROWS: Cast((6, 0.86, 2), (3, 0.89, 1), (5, 0.92, 2)),
    VECTORS: Cast((4, 0.88, 1), (3, 0.86, 1), (3, 0.90, 1)),
    SQUARES: Cast((4, 0.81, 1), (3, 0.78, 1), (3, 0.78, 1)),
    MX: Cast((4, 0.08, 2), (3, 0.08, 1), (3, 0.08, 1)),
    FP4: Cast((3, 0.08, 2), (2.5, 0.08, 1), (2.5, 0.08, 1)),
}
"""Source: docs/measurements/kernels.md, "Quantizers", rows one per tensor, one per row, 1x128 and 256x256. 1x32 and
1x16, for which f8sub has no kernels, have the share of Inductor's for 1x128."""

PRIOR = Cast((4, 0.88, 1), (3, 0.88, 1), (3, 0.88, 1))
"""With scales that are known beforehand. Source: there, row "``delayed``, later steps", which is both usages'."""

PLAIN = CASTS[MX]
"""Of experts' tokens with such scales, which no kernel casts: not measured, so taken as slow as other plain casts."""

SWIGLU = {WHOLE: (0.75, 0.78), ROWS: (0.65, 0.57), VECTORS: (0.85, 0.74)}
"""Shares of a copy's speed of casts that compute SwiGLU, then of those that compute its gradients, by tiles.

Source: docs/measurements/experts.md, "The casts alone".
"""

SWIGLU_WIDTH = 128
"""Divides the experts' inner width where the casts compute SwiGLU."""

DERIVED, TRANSPOSED = {ROWS: (3, 0.67, 2)}, (2, 0.83, 1)
"""The same of gathered codes that become columnwise: those that are re-scaled, and others. Source: there, the two rows
"gathered codes to the columnwise usage"."""


@dataclass(frozen=True, slots=True)
class Run:
    """Describes how a model is trained.

    Attributes:
        tokens: tokens per GPU in a step.
        sequence: tokens that attend to each other.
        shards: GPUs that share one copy of the weights.
        replicas: copies of the weights.
        checkpoint: one of ``CHECKPOINTS``.
        compiled: whether ``torch.compile`` compiles each block.
        sharded: whether ``fully_shard`` shards, one group per block; else the weights stay on one GPU, in bf16.
        kernels: whether eager norms and activations are a kernel each, such as Liger-Kernel's.
        clipped: whether gradients are clipped by their norm.
    """

    tokens: float = 8192
    sequence: int = 8192
    shards: int = 8
    replicas: int = 1
    checkpoint: str = SELECTIVE
    compiled: bool = True
    sharded: bool = True
    kernels: bool = False
    clipped: bool = True

    @property
    def master_bytes(self) -> int:
        """The bytes of a parameter of the master weight: float32 under FSDP2, else bf16."""
        return 4 if self.sharded else 2

    @property
    def optimizer_passes(self) -> int:
        """The bytes that clipping and AdamW move, as a multiple of a parameter's."""
        return ADAMW + CLIPPING * self.clipped

    @property
    def elementwise(self) -> float:
        """The bytes that elementwise work moves per element of a layer's x and y."""
        eager = ELEMENTWISE_KERNELS if self.kernels else ELEMENTWISE_EAGER
        return ELEMENTWISE if self.compiled else eager


@dataclass(frozen=True, slots=True)
class Seconds:
    """Holds the seconds of a step, or of a part of it.

    Attributes:
        gemms: products with weights.
        casts: to float8, and the weights' transposition.
        attention: scores and their products with values.
        elementwise: norms, activations, residuals.
        copies: FSDP2's casts and copies into and out of buffers.
    """

    gemms: float = 0.0
    casts: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    copies: float = 0.0

    @property
    def total(self) -> float:
        """The sum, in seconds."""
        return sum(float(getattr(self, name)) for name in self.__slots__)

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


def linear_seconds(
    product: Product, recipe: Recipe | None, gpu: Gpu, run: Run, repeated: bool = False, gathered: bool = True
) -> Seconds:
    """Predict the seconds of one weight's three products and of the casts of their operands.

    Args:
        product: the weight; ``recipe`` is for those that are converted.
        recipe: None for bf16.
        gpu: the GPU that runs them.
        run: how the model is trained.
        repeated: whether backward computes y again.
        gathered: whether the weight is gathered as float8 data.
    """
    used = recipe if product.reason is None else None
    if used is not None and product.experts and is_one_by_one(used):
        used = None  # which a GPU has no grouped products for
    # tokens of all experts together
    rows = run.tokens * product.uses
    fprop, dgrad, wgrad = _gemms(product, used, rows, gpu)
    # A frozen weight has no wgrad.
    gemms = fprop * (2 if repeated else 1) + dgrad + (0.0 if product.frozen else wgrad)
    if used is None:
        return Seconds(gemms)
    n, k = product.rows, product.cols
    prior = PRIOR if used.delayed is not None and not run.compiled else None
    own = PLAIN if used.delayed is not None and product.experts else prior
    (x_row, x_col), (dy_row, dy_col) = used.formats("x"), used.formats("dy")
    if product.frozen:  # columns are wgrad's
        x_col = dy_col = None
    casts = 0.0
    # Siblings share the cast of their x: the first one pays.
    is_fused = own is None and _computes_swiglu(product)
    if is_fused and product.swiglu == RESULT and (share := _shares(x_row, x_col)) is not None:
        # Six bytes with SwiGLU's own, of which the cast costs what it is slower than a copy.
        casts += 6 * _lost(rows * k, share[0], gpu) * (1 if run.checkpoint == NONE else 2)
    elif not product.shares_x:
        casts += _cast(x_row, x_col, rows * k, gpu, own)
        # Backward of a checkpointed block casts x again, rowwise only if it repeats fprop.
        if run.checkpoint != NONE:
            casts += _cast(x_row if repeated else None, x_col, rows * k, gpu, own)
    if is_fused and product.swiglu == GRADIENTS and (share := _shares(dy_row, dy_col)) is not None:
        # Ten bytes of an element of SwiGLU's result, which has two gradients.
        casts += 5 * _lost(rows * n, share[1], gpu)
    else:
        casts += _cast(dy_row, dy_col, rows * n, gpu, own)
    gathered = gathered and wire_format(product, used) is not None
    casts += _weight_casts(used, product.elements, gpu, prior, gathered)
    return Seconds(gemms, casts)


def _computes_swiglu(product: Product) -> bool:
    inner = product.cols if product.swiglu == RESULT else product.rows
    return bool(product.swiglu) and inner % SWIGLU_WIDTH == 0


def _shares(row: Float8Format | None, col: Float8Format | None) -> tuple[float, float] | None:
    format = row or col
    return None if format is None else SWIGLU.get(kind_of_tiles(format))


def _lost(elements: float, share: float, gpu: Gpu) -> float:
    """Return the seconds that a byte of each element takes longer than in a copy."""
    return elements / gpu.copy * (1 / share - 1)


def _gemms(product: Product, recipe: Recipe | None, rows: float, gpu: Gpu) -> tuple[float, float, float]:
    """Predict the seconds of fprop, dgrad and wgrad for x of (rows, K)."""
    n, k, experts = product.rows, product.cols, product.experts
    specs = (HIGH_GEMM,) * 3 if recipe is None else (recipe.fprop, recipe.dgrad, recipe.wgrad)
    if not experts:
        return (
            gemm_seconds(specs[0], rows, k, n, gpu),  # y [M, N]
            gemm_seconds(specs[1], rows, n, k, gpu),  # dx [M, K]
            gemm_seconds(specs[2], n, rows, k, gpu),  # dw [N, K]
        )
    return (
        GAP + by_expert_seconds(specs[0], rows, k, n, experts, gpu),  # y [M, N]
        GAP + by_expert_seconds(specs[1], rows, n, k, experts, gpu),  # dx [M, K]
        GAP + over_tokens_seconds(specs[2], rows, n, k, experts, gpu),  # dw [E, N, K]
    )


def fprop_seconds(product: Product, recipe: Recipe | None, run: Run, gpu: Gpu) -> float:
    """Predict the seconds of one forward's product with a weight."""
    used = recipe if product.reason is None else None
    return _gemms(product, used, run.tokens * product.uses, gpu)[0]


def gemm_seconds(spec: GemmSpec, m: float, k: float, n: float, gpu: Gpu) -> float:
    """Predict the seconds of one product, (m, k) by (n, k), to (m, n) in bf16."""
    size = [2.0 if operand is None else 1 / operand.codes_per_byte for operand in (spec.a, spec.b)]
    read = m * k * size[0] + n * k * size[1]
    # It reads while it multiplies, and then writes bf16.
    return max(2 * m * n * k / gpu.rate(spec), read / gpu.copy) + 2 * m * n / gpu.copy + GAP


def _cast(
    row: Float8Format | None, col: Float8Format | None, elements: float, gpu: Gpu, own: Cast | None
) -> float:
    format = row or col
    if format is None:
        return 0.0
    # Kinds that no kernel of f8sub casts cost as much as those that Inductor casts.
    table = own or CASTS.get(kind_of_tiles(format), CASTS[MX])
    usage = table.both if row is not None and col is not None else table.row if row is not None else table.col
    return _moved(usage, elements, gpu)


def _moved(cost: tuple[float, float, int], elements: float, gpu: Gpu) -> float:
    bytes_each, share, launches = cost
    return elements * bytes_each / (gpu.copy * share) + launches * CAST_GAP


def _weight_casts(recipe: Recipe, elements: int, gpu: Gpu, prior: Cast | None, gathered: bool) -> float:
    row, col = recipe.formats("w")
    # What FSDP2 gathers as float8 was cast by shards, which ``copy_seconds`` counts.
    made = 0.0 if gathered and row is not None else _cast(row, None, elements, gpu, prior)
    if row is None or col is None:
        return made + _cast(None, col, elements, gpu, prior)
    # The columnwise operand is computed from the rowwise one.
    return made + _moved(DERIVED.get(kind_of_tiles(row), TRANSPOSED), elements, gpu)


def repeats(products: Sequence[Product], run: Run) -> list[bool]:
    """Return for each product of one block whether backward repeats it."""
    if run.checkpoint in (NONE, GEMMS):
        return [False] * len(products)
    last = last_of(products)
    # Backward reads no y of the last product, so it is not repeated.
    if run.checkpoint == FULL:
        return [i != last for i in range(len(products))]
    met: Counter[tuple[int, int]] = Counter()
    found = []
    for i, product in enumerate(products):
        met[product.rows, product.cols] += 1
        # every second product of one shape
        found.append(met[product.rows, product.cols] % 2 == 0 and i != last)
    return found


def last_of(products: Sequence[Product]) -> int:
    """Return the index of the product whose y nothing in the block reads: the last one that shares its x with none."""
    readers = Counter(product.reads for product in products)
    alone = [i for i, product in enumerate(products) if readers[product.reads] == 1]
    return alone[-1] if alone else len(products) - 1


def block_seconds(products: Sequence[Product], recipe: Recipe | None, gpu: Gpu, run: Run) -> Seconds:
    """Predict the seconds of one numbered block, forward and backward, collectives aside."""
    found = Seconds()
    for product, again in zip(products, repeats(products, run), strict=True):
        found += linear_seconds(product, recipe, gpu, run, again, run.sharded)
    # Only full checkpointing repeats the forward of attention.
    passes = ATTENTION_PASSES + (1 if run.checkpoint == FULL else 0)
    attention = sum(passes * attention_seconds(p, gpu, run) for p in products if p.reads_attention)
    # elements of x and y per token
    touched = sum(p.uses * (p.rows + (0 if p.shares_x else p.cols)) for p in products)
    each = run.elementwise
    each *= 1 if run.checkpoint == NONE else 1 + REPEATED_ELEMENTWISE
    elementwise = run.tokens * touched * each / gpu.copy
    # Tokens are sent to experts once per block.
    if first := next((p for p in products if p.experts), None):
        elementwise += run.tokens * first.uses * first.cols * ROUTED / gpu.copy
    found += Seconds(attention=attention, elementwise=elementwise)
    return found + copy_seconds(products, recipe, gpu, run, own=sends_codes(products, recipe))


def attention_seconds(product: Product, gpu: Gpu, run: Run) -> float:
    """Predict the seconds of one forward of causal attention, or of as much of backward, whose result a layer reads."""
    # Causal: half of the scores of each head.
    scores = run.tokens * run.sequence / 2 * product.cols / product.head
    # Seconds per score: two products, 2 FLOPs per feature of the head.
    flops = 4 * product.head / gpu.attention
    # A GPU's rate is that of heads of HEAD_SIZE, whose exponentials it includes.
    exponentials = 2 / ATTENTION_PASSES / EXPONENTIALS * H200.attention / gpu.attention
    return scores * (flops + exponentials * (1 - product.head / HEAD_SIZE))


def wire_format(product: Product, recipe: Recipe | None) -> Float8Format | None:
    """Return the format in which a weight is gathered, as it is stored; None if in high precision."""
    if recipe is None or product.reason is not None or None in recipe.formats("w"):
        return None
    row = recipe.formats("w")[0]
    if row is None or not product.experts:
        return row
    return stored_format(row, product.stored[0] // product.experts, product.transposed)


def sends_codes(products: Iterable[Product], recipe: Recipe | None) -> bool:
    """Return whether any of the weights is gathered as float8 data."""
    return any(wire_format(product, recipe) is not None for product in products)


def code_bytes(product: Product, recipe: Recipe | None) -> float:
    """Return the bytes per element of a gathered weight, scales aside."""
    format = wire_format(product, recipe)
    return 2.0 if format is None else 1 / format.codes_per_byte


def copy_seconds(
    products: Sequence[Product],
    recipe: Recipe | None,
    gpu: Gpu,
    run: Run,
    passes: int = 2,
    *,
    own: bool,
) -> Seconds:
    """Predict the seconds of FSDP2's casts of shards, and of copies into and out of the memory of collectives.

    Args:
        products: the weights.
        recipe: what they are gathered in; None for bf16.
        gpu: where.
        run: how the model is trained.
        passes: how often a step gathers them.
        own: whether some weights of the model are gathered in float8. f8sub then copies for all of them.
    """
    if not run.sharded:
        return Seconds()
    copies = 0.0
    copied_out = min(passes, OWN_COPIES_OUT) if own else passes
    for product in products:
        code = code_bytes(product, recipe)
        whole, shard = product.elements, product.elements / run.shards
        # The gathered weight is copied out; the float32 shard is read, cast and copied in.
        copies += whole * copied_out * 2 * code + shard * (4 + code + passes * 2 * code)
        copies += shard * 4 if code < 2 else 0
        if not product.frozen:
            copies += whole * copy_in(product, recipe, own=own) + shard * 8
    return Seconds(copies=copies / gpu.copy)


def copy_in(product: Product, recipe: Recipe | None, *, own: bool) -> float:
    """Return the bytes of a copy's speed that an element of a gradient takes on its way into the reduction."""
    if not own:
        return COPY_IN
    return OWN_COPY_IN if wire_format(product, recipe) is None else UNROUNDED


def rest_of(shapes: Shapes) -> tuple[Product, Product]:
    """Return as products of no rows what is gathered and multiplies nothing: parameters that learn, and frozen ones."""
    learning = Product(
        "", 0, 0, 0, shapes.other_parameters - shapes.other_frozen, "no product", "", False, None
    )
    return learning, replace(learning, elements=shapes.other_frozen, frozen=True)


def loss_seconds(logits: int, gpu: Gpu, run: Run) -> float:
    """Predict the seconds of softmax and cross entropy over so many logits per token."""
    return run.tokens * logits * (LOGIT_BYTES if run.compiled else LOGIT_BYTES_EAGER) / gpu.copy


def optimizer_seconds(learning: int, gpu: Gpu, run: Run) -> float:
    """Predict the seconds of clipping and AdamW over this GPU's share of so many parameters."""
    return learning / run.shards * run.master_bytes * run.optimizer_passes / gpu.copy


def host_seconds(
    products: Sequence[Product],
    recipe: Recipe | None,
    run: Run,
    *,
    gathers: bool = True,
    in_float8: bool = False,
    parts: int = 1,
) -> float:
    """Predict the host's seconds to launch a step of one block from Python; 0 in eager code, which was not measured.

    Args:
        products: the block's.
        recipe: None for bf16; layers that stay in high precision are launched as in bf16.
        run: how the model is trained.
        gathers: whether FSDP2 gathers float8 data.
        in_float8: whether gradients are reduced in float8.
        parts: GPUs that share a layer.
    """
    if not run.compiled:
        return 0.0
    host = HOST_ALONE if not run.sharded else HOST_PARTS if parts > 1 else HOST
    converted = 0 if recipe is None else sum(product.reason is None for product in products)
    layer = host.layer - (0.0 if gathers else host.gathered)
    return host.block + converted * layer + HOST_GRADIENTS * in_float8


def by_product(shapes: Shapes, recipe: Recipe | None, gpu: Gpu, run: Run) -> dict[tuple[str, int], float]:
    """Predict the seconds of each weight's products and casts, by its name and N."""
    found: dict[tuple[str, int], float] = {}
    outside = shapes.outside
    for products in (*shapes.blocks.values(), outside):
        # Only numbered blocks are checkpointed.
        again = [False] * len(products) if products is outside else repeats(products, run)
        for product, repeated in zip(products, again, strict=True):
            time = linear_seconds(product, recipe, gpu, run, repeated, run.sharded).total
            found[product.fqn, product.rows] = found.get((product.fqn, product.rows), 0.0) + time
    return found
