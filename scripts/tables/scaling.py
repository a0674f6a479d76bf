"""What float8 adds to the speed of a training step on 8 to 1024 GPUs, part by part: docs/scaling.md, by the step model.

Figures are those of ``python -m f8sub estimate``, for H100s with 8 a host and 400 Gbit/s each. Beside them the steps of
the article on FSDP2's float8 all-gather, and every run that the model is held to.

    python scripts/tables/scaling.py --write-docs --image docs/images/scaling.svg
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

import f8sub
from f8sub import StepEstimate
from f8sub.estimator.estimate import GATHERS
from f8sub.estimator.models import load
from scripts.table import Table, parser, provenance, write_between_markers, write_json
from scripts.tables import drawing
from tests.estimator.runs import (
    PUBLISHED,
    published,
    rates,
    speed_ups,
    whole_runs,
)

MODELS: dict[str, dict[str, Any]] = {
    "llama3-8b": {"checkpoint": "selective", "gpus": (8, 64, 128, 1024)},
    "llama3-70b": {"checkpoint": "full", "gpus": (64, 128, 1024)},
    "llama3-405b": {"checkpoint": "full", "gpus": (256, 1024), "tensor_parallel": 4},
}
DRAWN = (8, 16, 32, 64, 128, 256, 512, 1024)
LEAST = {"llama3-8b": 8, "llama3-70b": 32, "llama3-405b": 128}
"""GPUs that hold the model."""

TOKENS = (8192, 2048)
HEADERS = (
    "float8 compute",
    "+ all-gather, a scale at a time",
    "+ one all-reduce of scales",
    "gradients in bf16",
    "gradients in e4m3",
    "launched from Python: one all-reduce of scales",
)


def title(model: str) -> str:
    parts = MODELS[model].get("tensor_parallel", 1)
    return f"{model.removeprefix('llama3-').upper()}{f', {parts} share a layer' if parts > 1 else ''}"


@functools.cache
def predicted(model: str, gpus: tuple[int, ...], tokens: int) -> StepEstimate:
    options = {name: value for name, value in MODELS[model].items() if name != "gpus"}
    return f8sub.estimate_step(load(model), gpus, tokens=tokens, recipe="tensorwise", **options)


def speeds() -> Table:
    """Of each model replayed: tokens/s in bf16, and every way as a multiple of them; then one that is launched."""
    rows: list[list[str]] = []
    for tokens in TOKENS:
        for model, options in MODELS.items():
            found = predicted(model, options["gpus"], tokens)
            for gpus in options["gpus"]:
                first, *others = (found.of(gpus, way) for way in found.ways)
                ratios = [f"{each.replayed:.2f}" for each in others]
                ratios.append(f"{found.of(gpus, GATHERS).over_bf16:.2f}")
                name = f"{title(model)}, {tokens:,} tokens, {gpus:,} GPUs"
                rows.append(
                    [name, f"{tokens / first.replayed_seconds / found.clusters[0].parts:,.0f}", *ratios]
                )
    columns = ["model, tokens of a rank", "bf16, tokens/s per GPU", *HEADERS]
    return Table("Tokens/s over bf16 with float32 reductions, predicted", columns, rows)


def article() -> Table:
    """The three steps of the article on FSDP2's float8 all-gather, and what the model says of its run."""
    run = PUBLISHED[0]
    found = published(run)
    rows = []
    for way in found.ways[1:]:
        told = run["over_bf16"].get(way)
        ratio = found.of(run["gpus"], way).over_bf16
        rows.append([way.strip(), "" if told is None else f"{told:.2f}", f"{ratio:.2f}"])
    return Table(f"{run['run']}, {run['gpu']}s", ["", "published", "predicted"], rows)


def errors() -> Table:
    """Every run that the model is held to."""
    groups = (
        ("tokens/s, H200s: ", whole_runs()),
        ("over bf16, published: ", speed_ups()),
        ("tokens/s in bf16, published: ", rates()),
    )
    rows = [[f"{name}{run}", f"{error:+.1%}"] for name, found in groups for run, error in found.items()]
    return Table("Errors", ["", "predicted is off by"], rows)


def draw() -> Figure:
    """Tokens/s over bf16 by the number of GPUs, a panel a model and number of tokens."""
    ways = {
        "float8 compute": drawing.GREY,
        "+ float8 all-gather, one all-reduce of scales": drawing.BLUE,
        "float8 compute and all-gather, gradients in bf16": drawing.ORANGE,
        "float8 compute and all-gather, gradients in e4m3": drawing.INK,
    }
    with mpl.rc_context(drawing.STYLE):
        figure = Figure(figsize=(8.4, 5.6), layout="constrained")
        figure.suptitle(
            "Tokens/s over bf16 on H100s, predicted for replayed steps", fontweight="bold", x=0.01, ha="left"
        )
        panels = figure.subplots(len(TOKENS), len(MODELS), sharey="row", sharex=True)
        for row, tokens in zip(panels, TOKENS, strict=True):
            for axes, model in zip(row, MODELS, strict=True):
                counts = tuple(count for count in DRAWN if count >= LEAST[model])
                found = predicted(model, counts, tokens)
                names = [found.ways[1], *found.ways[3:]]
                for (label, colour), way in zip(ways.items(), names, strict=True):
                    values = [found.of(count, way).replayed for count in counts]
                    axes.plot(
                        counts, values, label=label, color=colour, linewidth=1.6, marker="o", markersize=3
                    )
                axes.axhline(1, color=drawing.GREY, linewidth=0.8, linestyle=":")
                axes.set_xscale("log", base=2)
                axes.set_xticks([8, 64, 1024], ["8", "64", "1024"])
                axes.set_title(f"{title(model)}, {tokens:,} tokens", loc="left", fontsize=9)
                axes.spines[["top", "right"]].set_visible(False)
                axes.grid(alpha=0.3)
        panels[-1][1].set_xlabel("GPUs")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        return figure


TABLES = {"scaling": speeds, "scaling_article": article, "scaling_errors": errors}


def main() -> None:
    made = parser(__doc__, "scaling")
    made.add_argument("--image", type=Path, help="also draw speeds by the number of GPUs there")
    arguments = made.parse_args()
    for marker, make in TABLES.items():
        table = make()
        table.show()
        if arguments.write_docs:
            write_between_markers(marker, f"{table.markdown()}\n\n{provenance()}")
    if arguments.image:
        drawing.save(draw(), arguments.image)
    if arguments.json:
        found = [predicted(model, options["gpus"], n) for n in TOKENS for model, options in MODELS.items()]
        write_json(arguments.json, [each.as_dict() for each in found])


if __name__ == "__main__":
    main()
