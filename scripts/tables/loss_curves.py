"""Loss curves of a small Llama in bf16 and in float8: docs/images/loss_curves.svg, from ``loss_curves.json``.

The runs are those of ``scripts/loss_compare.py``, one seed, minutes on a CPU. ``--record FOLDER`` reads them into the
file.

    python scripts/loss_compare.py --recipes tensorwise rowwise --seeds 0
    python scripts/tables/loss_curves.py --record runs/loss_compare --image docs/images/loss_curves.svg
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
from pathlib import Path
from typing import Annotated, Any

import tyro

from scripts.loss_compare import SMOOTHED_STEPS, read_run
from scripts.table import processor
from scripts.tables import drawing

DATA = Path(__file__).with_suffix(".json")
ARMS = ("bf16", "tensorwise", "rowwise")


def record(folder: Path, seed: int = 0) -> dict[str, Any]:
    """The training losses of each arm's run of one seed, and where and when they were trained."""
    runs = {arm: read_run(folder / f"{arm}-seed{seed}").training for arm in ARMS}
    torch = importlib.metadata.version("torch").partition("+")[0]
    return {
        "command": "python scripts/loss_compare.py --recipes tensorwise rowwise --seeds 0",
        "machine": f"{processor()}, torch {torch}",
        "date": datetime.date.today().isoformat(),
        "losses": {arm: [round(losses[step], 4) for step in sorted(losses)] for arm, losses in runs.items()},
    }


def smoothed(losses: list[float]) -> list[float]:
    """Means over the last steps, fewer at the start."""
    windows = (losses[max(0, i + 1 - SMOOTHED_STEPS) : i + 1] for i in range(len(losses)))
    return [sum(window) / len(window) for window in windows]


def main(image: Path, folder: Annotated[Path | None, tyro.conf.arg(name="record")] = None) -> None:
    if folder:
        DATA.write_text(json.dumps(record(folder)) + "\n")
    drawing.save(draw(json.loads(DATA.read_text())), image)


def draw(data: dict[str, Any]) -> Any:
    """The curves, and below them how far each is from bf16's, in per cent."""
    curves = {arm: smoothed(losses) for arm, losses in data["losses"].items()}
    note = (
        f"A Llama of 3.5M parameters on Python sources, 512 tokens a step, seed 0, means over {SMOOTHED_STEPS} steps; "
        f"{data['command']}; {data['machine']}; {data['date']}."
    )
    return drawing.curves("Training loss in float8 and in bf16", note, curves, "bf16")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
