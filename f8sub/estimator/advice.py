"""Advises on an estimate: which recipe, which layers to skip, which checkpoint policy, attention in float8."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from f8sub.convert.products import kind_of
from f8sub.estimator.bytes import OPERANDS, Memory
from f8sub.estimator.cluster import Arm, Cluster, gathered_seconds, step_of
from f8sub.estimator.experts import Gains
from f8sub.estimator.seconds import (
    ATTENTION_PASSES,
    FULL,
    HOST_RANGE,
    NONE,
    Run,
    attention_seconds,
    by_product,
)
from f8sub.formats import ALL
from f8sub.recipes import DEFAULT

if TYPE_CHECKING:
    from f8sub.convert.products import Product, Shapes
    from f8sub.estimator.gpus import Gpu
    from f8sub.estimator.results import Policy, Prediction
    from f8sub.recipe import Recipe

FULL_SHARE, NEAR, LITTLE, MUCH_EXPOSED = 0.95, 0.03, 1.05, 0.15
"""Choices, not measured: of a GPU's memory a step may take so much, the rest is the allocator's and NCCL's; speeds that
differ by less are the same; a step that is fewer times as fast is not worth a change of numbers; such a share of
waiting is worth a word."""


MEASURED = (
    "A Llama 3 8B with 2,048 tokens on each of four H200s was measured 0.73 to 0.78 times as fast as bf16 in three "
    "runs, and 1.06 on a faster host. Replayed it was 1.32 times as fast, with gradients in float8 1.51."
)
"""Source: docs/measurements/several_gpus.md."""

MEASURED_OF_PARTS = (
    "A Llama 3 8B with 8,192 tokens for every two of four H200s, which share each layer, was measured 0.95 times as "
    "fast as bf16."
)
"""Source: docs/measurements/several_gpus.md."""


def fits(bytes_of: Memory, gpu: Gpu) -> bool:
    """Return whether a step of so many bytes fits in a GPU's memory."""
    return bytes_of.total <= FULL_SHARE * gpu.memory


def recommended(recipes: Sequence[Recipe], predictions: Sequence[Prediction]) -> Recipe | None:
    """Choose the default recipe where it is native and nearly as fast as the fastest, else the most precise that is.

    Speeds are those of replayed steps: where the host is the limit, all recipes are launched as slowly.

    Args:
        recipes: the recipes to choose from.
        predictions: of each recipe on the GPU.

    Returns:
        The recipe; None if none is native.
    """
    steps = {each.recipe: each.replayed for each in predictions if each.native}
    if not steps:
        return None
    # Differences below ``NEAR`` are smaller than the errors of an estimate.
    near = [recipe for recipe in recipes if steps.get(recipe.name, 0) >= max(steps.values()) * (1 - NEAR)]
    default = (recipe for recipe in near if recipe.name == DEFAULT)
    return next(default, None) or max(near, key=lambda recipe: (*_precision(recipe), steps[recipe.name]))


def _precision(recipe: Recipe) -> tuple[bool, int, int]:
    """Return a key that is larger for a more precise recipe."""
    formats = [format for operand in OPERANDS for format in recipe.formats(operand) if format is not None]
    edges = [edge for format in formats for edge in (format.tile.rows, format.tile.cols)]
    e5m2 = sum(format.dtype == torch.float8_e5m2 for format in formats)
    # First scales of the current step, then few operands in e5m2, then scales of few elements.
    return recipe.delayed is None, -e5m2, -sum(edge == ALL for edge in edges)


def advice(
    shapes: Shapes,
    recipe: Recipe | None,
    recipes: Sequence[Recipe],
    cluster: Cluster,
    run: Run,
    predictions: Sequence[Prediction],
    policies: Sequence[Policy],
) -> Iterator[str]:
    """Yield sentences, the most important first.

    Args:
        shapes: the model.
        recipe: the recommended one.
        recipes: those that were predicted.
        cluster: what they are about.
        run: how the model is trained.
        predictions: of that GPU.
        policies: of that GPU and recipe.
    """
    converted = any(product.reason is None for product in shapes.products)
    if recipe is None or not converted:
        unconverted = "No layer would be converted, so float8 changes nothing; the reasons are above."
        alone = f"No recipe has native kernels on {cluster.gpu.name}: train in bf16."
        yield alone if converted else unconverted
        return
    best = next(each for each in predictions if each.recipe == recipe.name)
    step = step_of(shapes, Arm(recipe), cluster, run)
    # Judged by replayed steps: the host slows every recipe down.
    if best.replayed < LITTLE:
        yield (
            f"Float8 {'gains little' if best.step >= 1 else 'loses time'} here: {recipe.name} makes a step "
            f"{best.replayed:.2f} times as fast as bf16's, of which {_share(shapes, cluster, run):.0%} are products "
            "that would be in float8."
        )
    else:
        call = f'f8sub.convert_to_float8(model, recipe="{recipe.name}"{shapes.option_of_experts(run.tokens)})'
        replay = " and f8sub.graph_step" if best.host_binds else ""
        yield f"{call}{replay}: {_why(best, recipes, predictions)}."
    if best.host_binds:
        yield (
            f"Launched from Python a step is {best.step:.2f} times as fast as in bf16: the host needs "
            f"{best.host_seconds * 1e3:.0f} ms for it, and the GPU waits {1 - step.replayed / step.launched:.0%} of "
            f"them. {host_measured(len(shapes.blocks), best.replayed)}"
        )
    if of_attention := advice_on_attention(shapes.products, cluster.gpu, run, step.replayed):
        yield of_attention
    if skip := losing(shapes, recipe, cluster, run):
        yield f"These layers lose time in float8: skip={skip}"
    yield from _of_memory(policies, cluster.gpu, run)
    # What compute waits for, and what hidden collectives take from it.
    exposed = (step.timeline.waiting + step.timeline.tax) / step.replayed
    if exposed > MUCH_EXPOSED:
        yield (
            f"Collectives add about {exposed:.0%} to a step, which float8 shortens little: gradients are reduced in "
            "float32. More tokens per GPU hide them."
        )
    yield from _of_experts(shapes, recipe, cluster, run)


def host_measured(blocks: int, replayed: float, parts: int = 1) -> str:
    """Say what was measured where the host is the limit, and what to do about it.

    Args:
        blocks: number of the model's blocks.
        replayed: the predicted speed over bf16's of replayed steps.
        parts: GPUs that share a layer.
    """
    if parts > 1:
        return f"{MEASURED_OF_PARTS} Give a GPU more tokens."
    if replayed <= 1:
        return "So few tokens gain nothing on the GPU either: give it more."
    # seconds per block to ms per step
    least, most = (blocks * each * 1e3 for each in HOST_RANGE)
    return (
        f"Hosts that were measured take {least:.0f} to {most:.0f} ms. {MEASURED} Replay the step by "
        "f8sub.graph_step, or give a GPU more tokens."
    )


def _of_experts(shapes: Shapes, recipe: Recipe, cluster: Cluster, run: Run) -> Iterator[str]:
    """Say what float8 gains for each kind of experts by the formula, and for a step, whose gathers it shortens too."""
    kinds: dict[tuple[str, bool], list[list[Product]]] = defaultdict(list)
    for module, products in shapes.experts_by_module.items():
        kinds[kind_of(module), products[0].reason is None].append(products)
    whole = sum(product.multiplications for product in shapes.products)
    plain = step_of(shapes, Arm(), cluster, run).replayed
    for (kind, converted), modules in kinds.items():
        share = sum(product.multiplications for products in modules for product in products) / whole
        names = {product.fqn for products in modules for product in products}
        # With these experts in float8, and with them in bf16; other layers stay as they are.
        steps = [
            plain / step_of(_in_float8(shapes, names, reason), Arm(recipe), cluster, run).replayed
            for reason in (None, "asked for")
        ]
        gain = Gains.of_shapes(shapes, cluster.gpu, cluster.gpus, run.tokens).of(modules[0], recipe)
        yield (
            f"Experts have {share:.0%} of the FLOPs and {'are in float8' if converted else 'stay in bf16'} ({kind}): "
            f"{gain}. A step is {steps[0]:.2f} times as fast as bf16's "
            f"with these experts in float8, {steps[1]:.2f} times without."
        )


def _in_float8(shapes: Shapes, names: set[str], reason: str | None) -> Shapes:
    """Return ``shapes`` with another reason for the products of these names."""
    products = (replace(each, reason=reason) if each.fqn in names else each for each in shapes.products)
    return replace(shapes, products=tuple(products))


def _why(best: Prediction, recipes: Sequence[Recipe], predictions: Sequence[Prediction]) -> str:
    """Return the recommended recipe's speed, and the fastest recipe that is more precise, if there is one."""
    speed = f"a {'replayed ' if best.host_binds else ''}step {best.replayed:.2f} times as fast as in bf16"
    precision = {recipe.name: _precision(recipe) for recipe in recipes}
    finer = [each for each in predictions if each.native and precision[each.recipe] > precision[best.recipe]]
    if not finer:
        return speed
    other = max(finer, key=lambda each: each.replayed)
    return f"{speed}; {other.recipe} is more precise and {other.replayed:.2f} times as fast"


def _share(shapes: Shapes, cluster: Cluster, run: Run) -> float:
    """Return the share of a bf16 step, 0 to 1, that products with weights to be converted take."""
    times = by_product(shapes, None, cluster.gpu, run)
    converted = {(product.fqn, product.rows) for product in shapes.products if product.reason is None}
    return sum(times[key] for key in converted) / step_of(shapes, Arm(), cluster, run).replayed


def _of_memory(policies: Sequence[Policy], gpu: Gpu, run: Run) -> Iterator[str]:
    chosen = next(policy for policy in policies if policy.checkpoint == run.checkpoint)
    fitting = [policy for policy in policies if policy.fits]
    if not fitting:
        yield f"No policy fits in {gpu.name}'s memory: shard over more GPUs, or give each fewer tokens."
        return
    fastest = min(fitting, key=lambda policy: policy.float8_seconds)
    if chosen.fits and fastest.float8_seconds >= chosen.float8_seconds * (1 - NEAR):
        return
    what = "No checkpointing" if fastest.checkpoint == NONE else f"Checkpointing '{fastest.checkpoint}'"
    if chosen.fits:
        yield f"{what} fits, too, and is {chosen.float8_seconds / fastest.float8_seconds:.2f} times as fast."
    else:
        yield f"Checkpointing {chosen.checkpoint!r} does not fit; {what.lower()} does."


def losing(shapes: Shapes, recipe: Recipe, cluster: Cluster, run: Run) -> list[str]:
    """Return patterns of converted layers that take longer in float8 than in bf16, siblings that share an x together.

    For experts, whose weights are most of what FSDP2 gathers, the time that the gathers save counts, too.
    """
    times = [by_product(shapes, each, cluster.gpu, run) for each in (None, recipe)]
    families: dict[str, list[Product]] = defaultdict(list)
    for product in shapes.products:
        if product.reason is None:
            # Experts are skipped by module, and siblings share the cast of their x.
            families[product.module if product.experts else product.reads].append(product)
    found: dict[str, None] = {}
    for family in families.values():
        saved = _saved_on_the_wire(family, recipe, cluster, run) if family[0].experts else 0.0
        # A sibling that does not pay for the cast may still lose by itself.
        losers = [p for p in family if p.shares_x and not p.experts and _gain(times, [p]) < 0]
        # If all of them together lose, all of them are skipped.
        if _gain(times, family) + saved < 0:
            losers = family
        found.update(dict.fromkeys(kind_of(product.module) for product in losers))
    return list(found)


def _saved_on_the_wire(products: Sequence[Product], recipe: Recipe, cluster: Cluster, run: Run) -> float:
    plain, own = (gathered_seconds(products, each, cluster, run) for each in (None, recipe))
    return plain - own


def _gain(times: list[dict[tuple[str, int], float]], products: Sequence[Product]) -> float:
    bf16, float8 = (sum(each[product.fqn, product.rows] for product in products) for each in times)
    return bf16 - float8


MEASURED_ATTENTION = ((2048, 0.65), (8192, 1.13), (32768, 1.24))
"""Tokens of a sequence, and speed of attention over bf16's, forward and backward with all casts. Source:
docs/measurements/parts.md, an H200, heads of 128 features."""

HOPPERS = ("H100", "H200")
"""GPUs that have the kernels that were measured."""

ATTENTION_HEAD = 128
"""Features of a head that backward takes on Hopper."""

LEAST_OF_ATTENTION = 1.01
"""A smaller gain of a step is not worth a change of numbers."""


SMALL_ATTENTION = 0.01
"""A smaller share of a step is not worth a sentence."""


def speed_of_attention(sequence: float) -> float:
    """Return the speed of float8 attention over bf16's, between the measured lengths."""
    # Shorter and longer ones than were measured gain as much as the nearest, at most and at least.
    first, last = MEASURED_ATTENTION[0], MEASURED_ATTENTION[-1]
    at = math.log2(min(max(sequence, first[0]), last[0]))
    intervals = itertools.pairwise(MEASURED_ATTENTION)
    (a, before), (b, after) = next(each for each in intervals if at <= math.log2(each[1][0]))
    return before + (after - before) * (at - math.log2(a)) / math.log2(b / a)


def why_attention_stays(gpu: Gpu, sequence: float, heads: Collection[int]) -> str | None:
    """Return why float8 attention does not gain; None where it does.

    Args:
        gpu: where it runs.
        sequence: tokens.
        heads: the sizes of the model's heads.
    """
    if gpu.name not in HOPPERS:
        return "in float8 it was measured on Hopper alone"
    if others := sorted({*heads} - {ATTENTION_HEAD}):
        return f"in float8 its backward takes heads of {ATTENTION_HEAD} features, and there are some of {others[0]}"
    if (speed := speed_of_attention(sequence)) <= 1:
        return f"in float8 it is {speed:.2f} times as fast over so few"
    return None


def advice_on_attention(products: Sequence[Product], gpu: Gpu, run: Run, step: float) -> str | None:
    """Return a sentence on what attention takes of a step, and what float8 makes of it; None where it takes little.

    Args:
        products: of the whole model.
        gpu: where it runs.
        run: how it is trained.
        step: seconds of a step, replayed, with attention in bf16.
    """
    reading = [product for product in products if product.reads_attention]
    # Only full checkpointing repeats the forward of attention.
    passes = ATTENTION_PASSES + (1 if run.checkpoint == FULL else 0)
    attention = passes * sum(attention_seconds(product, gpu, run) for product in reading)
    if attention < SMALL_ATTENTION * step:
        return None
    line = f"Attention over {run.sequence:,.0f} tokens, in bf16, is {attention / step:.0%} of that step"
    if reason := why_attention_stays(gpu, run.sequence, {product.head for product in reading}):
        return f"{line}; {reason}."
    gain = speed_of_attention(run.sequence)
    # What attention saves is saved of the step: nothing of it is hidden behind other work.
    faster = step / (step - attention * (1 - 1 / gain))
    if faster < LEAST_OF_ATTENTION:
        return (
            f"{line}; in float8 it is {gain:.2f} times as fast, which changes numbers and gains too little."
        )
    return (
        f"{line}. f8sub.attend_in_float8(model) makes attention {gain:.2f} times as fast and the step {faster:.2f} "
        "times; it changes numbers, see docs/attention.md."
    )
