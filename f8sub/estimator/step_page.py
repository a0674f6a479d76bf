"""A step's estimate as a table of 80 columns."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from f8sub.convert.messages import REFERENCE_TIMES_BF16
from f8sub.estimator.seconds import HOST_BF16

if TYPE_CHECKING:
    from f8sub.estimator.estimate_step import StepEstimate, StepPrediction

WIDTH, NAME, CELL, COLUMNS = 80, 40, 13, 3
"""Columns of the page, of a way's name and of a cell; numbers of GPUs beside one another."""

WHOLE_RUNS, SPEED_UPS, RATES = 0.06, 0.07, 0.07
"""The largest errors: of tokens/s of runs on one to four H200s; of published speed-ups, and of their tokens/s."""

ERRORS = (
    f"How near it is: tokens/s of whole runs of a Llama 3 8B on one to four H200s within {WHOLE_RUNS:.0%}; published "
    f"speed-ups on 8 to 256 H100s within {SPEED_UPS:.0%}, their tokens/s within {RATES:.0%}. Gradients in e4m3 "
    "gained less than predicted on two and four GPUs, and no run over several hosts was measured by f8sub."
)


def page(estimate: StepEstimate) -> str:
    """The whole page."""
    return "\n\n".join("\n".join(lines) for lines in (_head(estimate), _speeds(estimate), _parts(estimate)))


def _head(estimate: StepEstimate) -> list[str]:
    run, first = estimate.run, estimate.clusters[0]
    mesh = "fully_shard over all of them"
    if first.replicas > 1:
        mesh = f"{first.replicas} copies of the weights (HSDP)"
    if first.parts > 1:
        mesh += f", {first.parts} share each layer (tensor parallelism)"
    text = (
        f"{estimate.title}: {estimate.shapes.parameters / 1e9:.3g}B parameters, {len(estimate.shapes.blocks)} blocks, "
        f"on {first.gpu.name}s, {first.per_host} a host, {first.network / 1e9:g} Gbit/s a GPU; {mesh}. "
        f"{run.tokens:,} tokens a data-parallel rank in sequences of {run.sequence:,}; checkpointing: "
        f"{run.checkpoint}; recipe: {estimate.recipe}; gradients: {estimate.reduction}."
    )
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _speeds(estimate: StepEstimate) -> list[str]:
    lines, counts = ["Tokens/s of a GPU, and as a multiple of bf16's"], [c.gpus for c in estimate.clusters]
    host = len(estimate.shapes.blocks) * HOST_BF16
    for start in range(0, len(counts), COLUMNS):
        shown = counts[start : start + COLUMNS]
        lines.append(f"  {'GPUs':<{NAME - 2}}" + "".join(f"{count:>{CELL},}" for count in shown))
        for way in estimate.ways:
            cells = "".join(_speed(estimate.of(count, way), host) for count in shown)
            lines.append(f"  {way:<{NAME - 2}}{cells}".rstrip())
    if not all(each.fits for each in estimate.predictions):
        lines.append("  x: more than a GPU's memory")
    if any(each.seconds < host for each in estimate.predictions):
        lines.append(f"  h: a host took {host:.2f} s to launch a step of bf16; give a GPU more tokens")
    if not estimate.native:
        note = (
            f"{estimate.recipe} has no native kernels on {estimate.clusters[0].gpu.name}: its products are those of "
            f"the reference backend, about {REFERENCE_TIMES_BF16} times slower than bf16's."
        )
        lines += textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return lines


def _speed(found: StepPrediction, host: float) -> str:
    mark = "x" if not found.fits else "h" if found.seconds < host else " "
    return f" {f'{found.tokens_per_second:,.0f} {found.over_bf16:.2f}{mark}':>{CELL - 1}}"


def _parts(estimate: StepEstimate) -> list[str]:
    ways = estimate.ways[0], estimate.ways[-1]
    lines = [f"A step in ms, {ways[0]} and {ways[1].strip('+ ')}"]
    lines.append(f"  {'GPUs':>6}{'compute':>17}{'waits':>17}{'tax of hidden':>17}{'whole':>17}")
    for cluster in estimate.clusters:
        pair = [estimate.of(cluster.gpus, way) for way in ways]
        parts = [(e.timeline.compute, e.timeline.waiting, e.timeline.tax, e.seconds) for e in pair]
        cells = "".join(f"{f'{a * 1e3:,.0f}, {b * 1e3:,.0f}':>17}" for a, b in zip(*parts, strict=True))
        lines.append(f"  {cluster.gpus:>6,}{cells}")
    return [*lines, "", *textwrap.wrap(ERRORS, WIDTH, break_on_hyphens=False)]
