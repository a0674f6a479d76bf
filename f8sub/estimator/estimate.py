"""f8sub.estimate: predicted speed, memory and bytes on the wire of a model in float8."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from f8sub.convert.class_swap import EXPERTS
from f8sub.convert.filters import name_of
from f8sub.errors import Float8ConfigError, unknown
from f8sub.estimator import seconds
from f8sub.estimator.advice import (
    advice,
    fits,
    one_of,
    recommended,
)
from f8sub.estimator.experts import decided
from f8sub.estimator.gpus import GPUS, Gpu, gpu_of
from f8sub.estimator.memory import Adapters, Memory, adapters_of, memory
from f8sub.estimator.models import named_or_given
from f8sub.estimator.page import page
from f8sub.estimator.seconds import CHECKPOINTS, SELECTIVE, Run, Wire, wire
from f8sub.estimator.shapes import (
    Product,
    Shapes,
    alike,
    shapes_of,
)
from f8sub.experts.seams import refuse_unknown_experts
from f8sub.recipe import Recipe, get_recipe, recipe_names


@dataclass(frozen=True, slots=True)
class Prediction:
    """One recipe on one GPU.

    Attributes:
        gpu: its name.
        recipe: its name.
        native: whether every float8 product has a kernel there; the others' figures are of the reference backend.
        measured: whether measured runs on this GPU are held to the estimate; else it is from data sheets.
        blocks: bf16's time over float8's of all blocks, forward and backward; None without numbered blocks.
        step: the same of a whole step.
        step_seconds: of float8.
        bf16_seconds: of bf16.
        groups: the same ratio of each kind of layer, in the order of ``Estimate.groups``.
    """

    gpu: str
    recipe: str
    native: bool
    measured: bool
    blocks: float | None
    step: float
    step_seconds: float
    bf16_seconds: float
    groups: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind and shape.

    Attributes:
        name: of the layers, with ``*`` for numbers.
        count: how many they are.
        shape: (N, K) of one.
        flops_share: of the model's products with weights, 0 to 1.
        reason: why they are not converted; None where they are.
    """

    name: str
    count: int
    shape: tuple[int, int]
    flops_share: float
    reason: str | None


@dataclass(frozen=True, slots=True)
class Policy:
    """One checkpoint policy on the first GPU, with the recommended recipe.

    Attributes:
        checkpoint: its name.
        bf16: bytes at the peak, in bf16.
        float8: the same in float8.
        bf16_seconds: of a step.
        float8_seconds: the same in float8.
        fits: whether float8's bytes are at most 95 % of the GPU's memory.
    """

    checkpoint: str
    bf16: Memory
    float8: Memory
    bf16_seconds: float
    float8_seconds: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is predicted. ``str()`` is a page of 80 columns, ``as_dict()`` is for JSON.

    Times are of code compiled block by block with the host ahead of the GPU. An H200's are fitted to measured runs,
    which they hit within 10 % but for those that ``docs/estimate.md`` names.

    Attributes:
        title: the model's class.
        shapes: what was read of the model.
        run: how it is trained.
        gpus: the GPUs, the first one first.
        groups: layers by kind.
        predictions: each recipe on each GPU.
        recipe: the name of the recommended recipe; None where no recipe is native on the first GPU.
        policies: memory and speed by checkpoint policy.
        wire: bytes by the recommended recipe.
        wire_bf16: bytes in bf16.
        advice: sentences.
    """

    title: str
    shapes: Shapes
    run: Run
    gpus: tuple[Gpu, ...]
    groups: tuple[LayerGroup, ...]
    predictions: tuple[Prediction, ...]
    recipe: str | None
    policies: tuple[Policy, ...]
    wire: Wire
    wire_bf16: Wire
    advice: tuple[str, ...]

    def of(self, gpu: str, recipe: str) -> Prediction:
        """One prediction; Float8ConfigError where there is none, which lists those that there are."""
        return one_of(self.predictions, gpu=gpu, recipe=recipe)

    def as_dict(self) -> dict[str, Any]:
        """All figures, in seconds, bytes and ratios, as JSON takes them."""
        found = asdict(self)
        found["parameters"] = self.shapes.parameters
        found["blocks"] = len(self.shapes.blocks)
        found["not_counted"] = list(self.shapes.not_counted)
        del found["shapes"]
        found["gpus"] = [{"name": g.name, "measured": g.measured, "source": g.source} for g in self.gpus]
        for policy, row in zip(self.policies, found["policies"], strict=True):
            row["bf16"]["total"], row["float8"]["total"] = policy.bf16.total, policy.float8.total
        return found

    def __str__(self) -> str:
        return page(self)


def estimate(  # noqa: PLR0913  (a model, and how it is trained)
    model: torch.nn.Module | str,
    recipes: str | Recipe | Sequence[str | Recipe] | None = None,
    *,
    gpus: str | Sequence[str] = tuple(GPUS),
    tokens: int = 8192,
    sequence: int | None = None,
    mesh: Sequence[int] = (8,),
    checkpoint: str = SELECTIVE,
    skip: str | Sequence[str] = (),
    experts: bool | str = EXPERTS,
) -> Estimate:
    """Predict what float8 gains of a model, before anything runs; the model is read, not changed.

    Args:
        model: on any device, meta included; converted or not. Of one that is not, what ``convert_to_float8`` would
            convert. Or what ``python -m f8sub inspect`` takes for it, such as "llama3-8b". Where some parameters are
            frozen and others are not, memory is that of adapters over a frozen base.
        recipes: names or recipes, or one; None for all that come with f8sub.
        gpus: names, or one; the layers' figures and the advice are those of the first.
        tokens: of one GPU in one step.
        sequence: tokens that attend to each other; None for ``tokens``.
        mesh: GPUs that shard the weights, (shards,), or (replicas, shards) for HSDP.
        checkpoint: "none", "selective", "gemms" or "full", see ``f8sub.checkpoint_policy``: "selective" is what its
            ``"bf16"`` and torchtitan do.
        skip: glob patterns of layers that stay in high precision, as for ``convert_to_float8``.
        experts: whether experts of a mixture are converted, True, False or "auto", as for ``convert_to_float8``.

    Raises:
        Float8ConfigError: an unknown GPU, recipe or policy, a size that is no positive number, or a model without
            products with weights.
    """
    refuse_unknown_experts(experts, None)
    run = _run(tokens, tokens if sequence is None else sequence, mesh, checkpoint)
    found = tuple(gpu_of(name) for name in ([gpus] if isinstance(gpus, str) else gpus))
    if not found:
        raise Float8ConfigError(f"gpus is empty; choose of {', '.join(GPUS)}")
    model = named_or_given(model)
    shapes = shapes_of(model, [skip] if isinstance(skip, str) else skip, experts)
    if not shapes.products:
        raise Float8ConfigError("the model multiplies by no weights that f8sub could convert or count")
    asked = [recipes] if isinstance(recipes, str | Recipe) else recipe_names() if recipes is None else recipes
    chosen = [get_recipe(recipe) for recipe in asked]
    kinds = alike(shapes.products)
    predictions = tuple(
        _predict(decided(shapes, recipe, gpu, tokens), kinds, recipe, gpu, run)
        for gpu in found
        for recipe in chosen
    )
    best = recommended(chosen, [each for each in predictions if each.gpu == found[0].name])
    shapes = decided(shapes, best or chosen[0], found[0], tokens)
    adapters = adapters_of(model, shapes)
    policies = tuple(_policy(shapes, best, found[0], run, name, adapters) for name in CHECKPOINTS)
    own = tuple(each for each in predictions if each.gpu == found[0].name)
    todo = tuple(advice(shapes, best, found[0], run, own, policies))
    wires = wire(shapes, best, run), wire(shapes, None, run)
    name = None if best is None else best.name
    groups = _groups(shapes, kinds)
    return Estimate(
        type(model).__name__, shapes, run, found, groups, predictions, name, policies, *wires, todo
    )


def _run(tokens: int, sequence: int, mesh: Sequence[int], checkpoint: str) -> Run:
    shards = tuple(mesh) if isinstance(mesh, Sequence) else ()
    sizes = (tokens, sequence, *shards)
    if any(type(size) is not int or size < 1 for size in sizes) or len(shards) not in (1, 2):
        raise Float8ConfigError(
            f"tokens, sequence and the one or two sizes of a mesh are positive whole numbers, got {tokens!r}, "
            f"{sequence!r} and mesh={mesh!r}; (8,) is 8 GPUs that share the weights"
        )
    if sequence > tokens:
        raise Float8ConfigError(f"a GPU's {tokens} tokens hold no sequence of {sequence}: give more tokens")
    if checkpoint not in CHECKPOINTS:
        raise unknown("checkpoint policy", checkpoint, CHECKPOINTS)
    return Run(tokens, sequence, mesh[-1], mesh[0] if len(mesh) == 2 else 1, checkpoint)


Kinds = Mapping[tuple[str, int, int, str | None], Sequence[Product]]


def _groups(shapes: Shapes, kinds: Kinds) -> tuple[LayerGroup, ...]:
    whole = sum(product.multiplications for product in shapes.products)
    reasons = {product.fqn: product.reason for product in shapes.products}
    return tuple(
        LayerGroup(
            name_of([product.fqn for product in products]) or "(root)",
            len(products),
            (rows, cols),
            sum(product.multiplications for product in products) / whole,
            reasons[products[0].fqn],
        )
        for (_, rows, cols, _), products in kinds.items()
    )


def _predict(shapes: Shapes, kinds: Kinds, recipe: Recipe, gpu: Gpu, run: Run) -> Prediction:
    both = (None, recipe)
    steps = [seconds.step_seconds(shapes, each, gpu, run).total for each in both]
    by_block = shapes.blocks.values()
    blocks = [sum(seconds.block_seconds(block, each, gpu, run).total for block in by_block) for each in both]
    own = [seconds.by_product(shapes, each, gpu, run) for each in both]
    groups = tuple(
        sum(own[0][product.fqn, product.rows] for product in products)
        / sum(own[1][product.fqn, product.rows] for product in products)
        for products in kinds.values()
    )
    native = all(gpu.is_native(spec) for spec in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    ratios = blocks[0] / blocks[1] if by_block else None, steps[0] / steps[1]
    return Prediction(gpu.name, recipe.name, native, gpu.measured, *ratios, steps[1], steps[0], groups)


def _policy(
    shapes: Shapes, recipe: Recipe | None, gpu: Gpu, run: Run, name: str, adapters: Adapters | None
) -> Policy:
    run = replace(run, checkpoint=name)
    plain, own = (memory(shapes, each, run, adapters) for each in (None, recipe))
    times = [seconds.step_seconds(shapes, each, gpu, run).total for each in (None, recipe)]
    return Policy(name, plain, own, times[0], times[1], fits(own, gpu))
