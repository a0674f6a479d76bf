"""What whole training runs gained: tables of the README and of docs/measurements, and charts, from ``whole_run.json``.

Speed is in tokens per second and GPU, memory the peak of active GiB, as torchtitan and ``recipes/pretrain.py`` log
them. The file names the machine, the date and the command of every setting.

    python scripts/tables/whole_run.py --write-docs --images docs/images
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from scripts.table import Table, parser, write_between_markers
from scripts.tables import drawing

DATA = Path(__file__).with_suffix(".json")
DIFFERS_IN_MEMORY = "no checkpointing"
"""With checkpointing all arms have the same peak, within 2 GiB."""

DEFAULT, PEER = "f8sub tensorwise", "torchao tensorwise"


def read() -> dict[str, Any]:
    return json.loads(DATA.read_text())


def over(data: dict[str, Any], arm: str, setting: str, baseline: str = "bf16") -> float | None:
    """Speed of an arm over a baseline's of the same setting; None if the arm was not measured there."""
    speeds = data["tokens_per_second"]
    return speeds[arm][setting] / speeds[baseline][setting] if setting in speeds[arm] else None


def has_options(arm: str) -> bool:
    """Whether an arm has options beside its recipe, which change numbers."""
    return "," in arm


def default_table(data: dict[str, Any]) -> Table:
    """Arms without options in the first setting, f8sub's first: the README's table."""
    setting = next(iter(data["settings"]))
    speeds, gib = data["tokens_per_second"], data["active_gib"]
    arms = [arm for arm in speeds if not has_options(arm) and setting in speeds[arm]]
    arms.sort(key=lambda arm: not arm.startswith("f8sub"))
    rows = []
    for arm in arms:
        ratios = (over(data, arm, setting, baseline) for baseline in ("bf16", PEER))
        cells = [f"{speeds[arm][setting]:,}", *(f"{ratio:.2f}" for ratio in ratios)]
        name = f"**{arm}** (default)" if arm == DEFAULT else arm
        rows.append([name, *cells, f"{gib[arm][setting]:.1f}"])
    return Table(setting, ["", "tokens/s per GPU", "over bf16", "over torchao", "peak GiB"], rows)


def options_table(data: dict[str, Any]) -> Table:
    """Arms with options, in every setting: speed over bf16 and over torchao."""

    def cell(arm: str, setting: str) -> str:
        ratios = [over(data, arm, setting, baseline) for baseline in ("bf16", PEER)]
        return "-" if None in ratios else " / ".join(f"{ratio:.2f}" for ratio in ratios)

    settings = list(data["settings"])
    arms = [arm for arm in data["tokens_per_second"] if has_options(arm)]
    rows = [[arm, *(cell(arm, setting) for setting in settings)] for arm in arms]
    return Table("options that change numbers", ["over bf16 / over torchao", *settings], rows)


def full_table(data: dict[str, Any]) -> Table:
    """Every arm in every setting: tokens/s, the ratio to bf16, and the peak of active memory."""

    def cell(arm: str, setting: str) -> str:
        ratio = over(data, arm, setting)
        if ratio is None:
            return "-"
        speed, gib = data["tokens_per_second"][arm][setting], data["active_gib"][arm][setting]
        return f"{speed:,} ({ratio:.2f}), {gib:.1f} GiB"

    settings = list(data["settings"])
    rows = [[arm, *(cell(arm, setting) for setting in settings)] for arm in data["tokens_per_second"]]
    title = "tokens/s per GPU (over bf16), peak of active memory"
    return Table(title, ["tokens/s per GPU (over bf16), peak", *settings], rows)


def markdown(data: dict[str, Any]) -> dict[str, str]:
    """Text by marker; below each table the script, the machine and the date."""
    where = f"<sub>`python scripts/tables/whole_run.py` · {data['machine']} · {data['date']}</sub>"
    commands = "\n".join(f"- {setting}: `{command}`" for setting, command in data["settings"].items())
    notes = f"One run per row. {data['options']}\n\n{commands}"
    return {
        "whole_run": f"{default_table(data).markdown()}\n\n{where}",
        "whole_run_options": f"{options_table(data).markdown()}\n\n{where}",
        "whole_run_all": f"{full_table(data).markdown()}\n\n{notes}\n\n{where}",
    }


def draw(data: dict[str, Any], folder: Path) -> None:
    """Write ``whole_run_speed.svg`` and ``whole_run_memory.svg``."""
    subtitle = (
        f"Llama 3 8B, 8192 tokens per GPU, FSDP2 and torch.compile, {data['machine']}; {data['date']}. "
        "Pale: with options that change numbers, gradients reduced in float8, SwiGLU's input saved in float8 (swiglu)."
    )
    speeds: dict[str, dict[str, float]] = {setting: {} for setting in data["settings"]}
    memory: dict[str, float] = {}
    for arm, settings in data["active_gib"].items():
        for setting, gib in settings.items():
            speeds[setting][arm] = over(data, arm, setting) or math.nan
            if setting == DIFFERS_IN_MEMORY:
                memory[arm] = gib
    for name, title, values, unit in (
        ("speed", "Training speed over bf16", speeds, "{:.2f}"),
        ("memory", "Peak of active memory, GiB per GPU", {DIFFERS_IN_MEMORY: memory}, "{:.1f}"),
    ):
        pale = [arm for arm in data["active_gib"] if has_options(arm)]
        drawing.save(drawing.bars(title, subtitle, values, unit, pale), folder / f"whole_run_{name}.svg")


def main() -> None:
    made = parser(__doc__, "whole_run")
    made.add_argument("--images", type=Path, metavar="FOLDER", help="also draw the charts there")
    arguments = made.parse_args()
    data = read()
    for shown in (default_table(data), options_table(data), full_table(data)):
        shown.show()
    if arguments.write_docs:  # without the machine and the date of today, which are not those of the runs
        for marker, text in markdown(data).items():
            write_between_markers(marker, text)
    if arguments.images:
        draw(data, arguments.images)


if __name__ == "__main__":
    main()
