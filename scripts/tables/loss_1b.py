"""Held-out losses of the long run of a 1B Llama: a table, and docs/images/loss_1b.svg.

The run and its command are in docs/measurements/numerics.md; its losses are here as they were logged.

    python scripts/tables/loss_1b.py --write-docs
"""

from __future__ import annotations

import tyro
from matplotlib.figure import Figure

from scripts.table import ROOT, Table, write_between_markers
from scripts.tables import drawing

IMAGE = ROOT / "docs" / "images" / "loss_1b.svg"
EVERY = 400
HELD_OUT = {
    "bf16": [1.0722, 0.7478, 0.6728, 0.6241, 0.5857, 0.5490, 0.5237, 0.5105, 0.5061],
    "tensorwise": [1.0838, 0.7547, 0.6771, 0.6293, 0.5901, 0.5526, 0.5265, 0.5124, 0.5082],
}
"""By arm, after each ``EVERY`` steps."""
PROVENANCE = "two NVIDIA H200s for each arm, torch 2.11.0 · 2026-11-27"


def draw() -> Figure:
    """Both losses, and below them the gap."""
    note = (
        "A Llama of 974M parameters from random weights, 118M bytes of Python sources in 3,600 steps, one seed; "
        f"learning rate 3e-4, which decays to 0; {PROVENANCE}."
    )
    return drawing.curves(
        "Held-out loss of a 1B Llama",
        note,
        HELD_OUT,
        "bf16",
        every=EVERY,
        label="held-out loss",
        limits=(-0.2, 1.3),
    )


def table() -> Table:
    """Losses by step, and the gap."""
    steps = [EVERY * (at + 1) for at in range(len(HELD_OUT["bf16"]))]
    rows = [[arm, *(f"{loss:.4f}" for loss in losses)] for arm, losses in HELD_OUT.items()]
    gaps = [
        100 * (one / other - 1) for one, other in zip(HELD_OUT["tensorwise"], HELD_OUT["bf16"], strict=True)
    ]
    header = ["held-out loss after", *(f"{step:,}" for step in steps)]
    return Table("Held-out loss of a 1B Llama", header, [*rows, ["gap", *(f"{gap:+.1f} %" for gap in gaps)]])


def main(write_docs: bool = False) -> None:
    made = table()
    made.show()
    if write_docs:
        below = f"<sub>`python scripts/tables/loss_1b.py` · {PROVENANCE}</sub>"
        write_between_markers("loss_1b", f"{made.markdown()}\n\n{below}")
        drawing.save(draw(), IMAGE)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
