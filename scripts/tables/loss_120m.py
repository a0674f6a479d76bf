"""What float8 costs a 120M Llama, by arm and by forward pass: the tables of two pages and docs/images/loss_120m.svg.

The runs are those of ``scripts/loss_compare.py --shared-steps``, on GPUs; ``--record-from`` reads them into the file
``loss_120m.json``, as ``arms``, as ``options``, those with gradients reduced in place as ``gradients``, those of a
mixture of experts as ``experts``, those with attention's heads of 128 channels as ``attention`` and those of a 10M
Llama as ``small`` and ``twentieth``. Runs from scratch are in a folder of their own, one JSON file each with
``held_out``.

    python scripts/tables/loss_120m.py --record-from runs/loss_compare_120m --scratch runs/scratch
    python scripts/tables/loss_120m.py --record-from runs/loss_compare_120m --record-as gradients
    python scripts/tables/loss_120m.py --record-from runs/loss_compare_moe-120m --record-as experts
    python scripts/tables/loss_120m.py --record-from runs/loss_compare_120m-128 --record-as attention
    python scripts/tables/loss_120m.py --record-from runs/loss_compare_10m --record-as small
    python scripts/tables/loss_120m.py --write-docs
"""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import tyro
from matplotlib.figure import Figure

from scripts.loss_compare import BASELINE, CONFIDENCE, HALVES, YARDSTICK, student_t_quantile
from scripts.table import ROOT, Table, write_between_markers
from scripts.tables import drawing

DATA = Path(__file__).with_suffix(".json")
IMAGE = ROOT / "docs" / "images" / "loss_120m.svg"
NAMES = {
    HALVES: "bf16, gradients of half batches added (the noise)",
    "tensorwise": "`tensorwise`, the default",
    "rowwise": "`rowwise`",
    "blockwise": "`blockwise`",
    "torchao-tensorwise": "torchao's tensorwise",
    "tensorwise+fprop": "`tensorwise` in fprop alone",
    "tensorwise+dgrad": "`tensorwise` in dgrad alone",
    "tensorwise+wgrad": "`tensorwise` in wgrad alone",
    "tensorwise+inner_blocks": "`tensorwise`, first and last block in bf16",
    "tensorwise+coarse_x": "control: x in e5m2, wgrad in bf16",
}
OPTIONS = {
    HALVES: NAMES[HALVES],
    "tensorwise": NAMES["tensorwise"],
    "tensorwise+gradients_in_float8": "`tensorwise`, gradients coded in float8",
    "tensorwise-swiglu": "`tensorwise`, SwiGLU's input in float8",
    "tensorwise-head": "`tensorwise`, the output head in float8",
    "tensorwise+exact_sums": "`tensorwise` without fast accumulation",
    "torchao-rowwise": "torchao's rowwise",
}
GRADIENTS = {
    HALVES: NAMES[HALVES],
    "tensorwise": "`tensorwise`, the default on one GPU",
    "tensorwise+unrounded_gradients": "`tensorwise`, gradients reduced in place",
}
EXPERTS = {
    YARDSTICK: "float32 (the noise)",
    **{name: NAMES[name] for name in ("tensorwise", "rowwise", "blockwise")},
}
ATTENTION = {
    HALVES: NAMES[HALVES],
    "tensorwise": NAMES["tensorwise"],
    "tensorwise+attention_in_float8": "`tensorwise`, attention in float8",
    "tensorwise+attention_forward_in_float8": "`tensorwise`, attention's forward pass in float8",
}
SMALL = {
    "tensorwise": NAMES["tensorwise"],
    "tensorwise+bf16_end": "`tensorwise`, the last tenth of its own steps in bf16",
}
OTHERS = "options", "gradients", "experts", "attention", "small", "twentieth"
"""Runs of machines or models of their own."""

TWENTIETH = {
    HALVES: NAMES[HALVES],
    "tensorwise+bf16_twentieth": "`tensorwise`, the last twentieth of its own steps in bf16",
}
FORWARDS = {
    "x and w": "x and w, one scale per tensor",
    "x": "x alone",
    "w": "w alone",
    "x and w by rows": "x and w, one scale per row",
    "x and w by blocks": "x and w, one scale per block",
    "attention": "x and w of the attention's projections",
    "feed-forward": "x and w of the feed-forward layers",
    "down projections": "x and w of the down projections",
    "x in e5m2": "x in e5m2",
}


def record(folder: Path, scratch: Path, key: str) -> dict[str, Any]:
    """The recorded data, and as ``key`` the held-out losses of a folder of loss_compare's, by arm and seed."""
    data: dict[str, Any] = json.loads(DATA.read_text())
    arms: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*-seed*.json")):
        arm, _, seed = path.stem.rpartition("-seed")
        run = json.loads(path.read_text())
        arms.setdefault(arm, {})[seed] = {key: run[key] for key in ("eval_loss", "forwards") if key in run}
    if key != "arms":
        return {**data, key: {**data.get(key, {}), "arms": arms}}
    found: dict[str, dict[str, float]] = {}
    for path in sorted(scratch.glob("*-seed*.json")):
        arm, _, seed = path.stem.rpartition("-seed")
        found.setdefault(arm, {})[seed] = json.loads(path.read_text())["held_out"]
    return {**data, "arms": arms, "scratch": found}


def per_cent(loss: float, other: float) -> float:
    return 100 * math.log(loss / other)


def gaps(losses: dict[str, dict[str, float]], baseline: dict[str, float]) -> dict[str, list[float]]:
    """Gap to the baseline's loss of the same seed, in per cent, by arm."""
    return {
        arm: [per_cent(loss, baseline[seed]) for seed, loss in sorted(of.items())]
        for arm, of in losses.items()
    }


def half_widths(found: dict[str, list[float]]) -> dict[str, float]:
    """Half of each mean's confidence interval; the variance of a seed's gap is pooled over the arms."""
    degrees = sum(len(of) - 1 for of in found.values())
    squares = sum((gap - statistics.fmean(of)) ** 2 for of in found.values() for gap in of)
    quantile = student_t_quantile((1 + CONFIDENCE) / 2, degrees)
    return {arm: quantile * math.sqrt(squares / degrees / len(of)) for arm, of in found.items()}


def shared_gaps(data: dict[str, Any], names: dict[str, str] = NAMES) -> dict[str, list[float]]:
    """By arm, of the runs that have a start in common."""
    losses = {
        arm: {seed: run["eval_loss"] for seed, run in data["arms"][arm].items()} for arm in (BASELINE, *names)
    }
    baseline = losses.pop(BASELINE)
    return gaps(losses, baseline)


def forward_gaps(data: dict[str, Any]) -> dict[str, list[float]]:
    """By what is rounded in the forward pass of weights that bf16 trained."""
    seeds = [run["forwards"] for _, run in sorted(data["arms"][BASELINE].items())]
    return {name: [per_cent(seed[name], seed["bf16"]) for seed in seeds] for name in FORWARDS}


def rows(found: dict[str, list[float]], names: dict[str, str]) -> list[list[str]]:
    widths = half_widths(found)
    return [
        [
            names[arm],
            ", ".join(f"{gap:+.3f}" for gap in of),
            f"{statistics.fmean(of):+.3f} ± {widths[arm]:.3f} %",
        ]
        for arm, of in found.items()
    ]


def scratch_rows(data: dict[str, Any]) -> list[list[str]]:
    """Runs from scratch; bf16's are those that went on from their own shared steps."""
    baseline = {seed: run["eval_loss"] for seed, run in data["arms"][BASELINE].items()}
    found = gaps({arm: data["scratch"][arm] for arm in (HALVES, "tensorwise")}, baseline)
    return rows(found, NAMES)


def draw(data: dict[str, Any]) -> Figure:
    """Gaps of both kinds, a point for each seed and the mean with its interval."""
    with mpl.rc_context(drawing.STYLE):
        figure = Figure(figsize=(8.4, 5.8), layout="constrained")
        figure.suptitle("Held-out loss of a 120M Llama, % over bf16", fontweight="bold", x=0.01, ha="left")
        figure.supxlabel(textwrap.fill(data["note"], 130), fontsize=8, x=0.01, ha="left")
        panels = figure.subplots(2, 1, height_ratios=(len(NAMES), len(FORWARDS)), sharex=True)
        kinds = {
            "Trained in float8, all arms from one bf16 start": (shared_gaps(data), NAMES),
            "Trained in bf16, rounded in the forward pass alone": (forward_gaps(data), FORWARDS),
        }
        for axes, (title, (found, names)) in zip(panels, kinds.items(), strict=True):
            widths = half_widths(found)
            for place, (arm, of) in enumerate(found.items()):
                colour = (
                    drawing.GREY if arm == HALVES else drawing.ORANGE if "torchao" in arm else drawing.BLUE
                )
                axes.errorbar(statistics.fmean(of), place, xerr=widths[arm], color=colour, fmt="o", capsize=3)
                axes.plot(of, [place] * len(of), "|", color=drawing.INK, markersize=8)
            axes.set_yticks(range(len(found)), [names[arm].replace("`", "") for arm in found])
            axes.invert_yaxis()
            axes.axvline(0, color=drawing.INK, linewidth=0.8)
            axes.set_title(title, loc="left", fontsize=10)
            axes.grid(axis="x", alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        return figure


def tables(data: dict[str, Any]) -> dict[str, Table]:
    """Marker of the page -> table."""
    by_seed = ["gap by seed, %", "mean, 95 % interval"]
    trained = {
        "loss_120m_arms": (data, NAMES),
        "loss_120m_options": (data["options"], OPTIONS),
        "loss_120m_gradients": (data["gradients"], GRADIENTS),
        "loss_120m_experts": (data["experts"], EXPERTS),
        "loss_120m_attention": (data["attention"], ATTENTION),
        "loss_120m_small": (data["small"], SMALL),
        "loss_120m_twentieth": (data["twentieth"], TWENTIETH),
    }
    found = {
        marker: Table(marker, ["trained", *by_seed], rows(shared_gaps(runs, names), names))
        for marker, (runs, names) in trained.items()
    }
    for marker, runs in (("loss_120m_forwards", data), ("loss_120m_small_forwards", data["small"])):
        forwards = rows(forward_gaps(runs), FORWARDS)
        found[marker] = Table("forwards", ["rounded to float8", *by_seed], forwards)
    found["loss_120m_scratch"] = Table("from scratch", ["trained", *by_seed], scratch_rows(data))
    return found


def provenance(data: dict[str, Any], marker: str = "") -> str:
    """The line below each table; the runs' own command is in docs/measurements/numerics.md."""
    own = marker.removeprefix("loss_120m_").removesuffix("_forwards")
    ran = data[own] if own in OTHERS else data
    return f"<sub>`python scripts/tables/loss_120m.py` · {ran['machine']} · {ran['date']}</sub>"


def main(
    record_from: Path | None = None,
    record_as: Literal["arms", "options", "gradients", "experts", "attention", "small", "twentieth"] = "arms",
    scratch: Path = Path("runs/scratch"),
    write_docs: bool = False,
) -> None:
    if record_from:
        DATA.write_text(json.dumps(record(record_from, scratch, record_as), indent=1) + "\n")
    data = json.loads(DATA.read_text())
    for marker, made in tables(data).items():
        made.show()
        if write_docs:
            write_between_markers(marker, f"{made.markdown()}\n\n{provenance(data, marker)}")
    if write_docs:
        drawing.save(draw(data), IMAGE)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
