"""What whole training runs gained: the README's table and its two charts, from the figures in ``whole_run.json``.

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


def read() -> dict[str, Any]:
    return json.loads(DATA.read_text())


def over_bf16(data: dict[str, Any], arm: str, setting: str) -> float | None:
    """Speed of an arm over bf16's of the same setting."""
    speeds = data["tokens_per_second"]
    return speeds[arm][setting] / speeds["bf16"][setting] if setting in speeds[arm] else None


def table(data: dict[str, Any]) -> Table:
    def cell(arm: str, setting: str) -> str:
        ratio = over_bf16(data, arm, setting)
        if ratio is None:
            return "-"
        speed, gib = data["tokens_per_second"][arm][setting], data["active_gib"][arm][setting]
        return f"{speed:,} ({ratio:.2f}), {gib:.1f} GiB"

    settings = list(data["settings"])
    rows = [[arm, *(cell(arm, setting) for setting in settings)] for arm in data["tokens_per_second"]]
    return Table(
        "tokens/s a GPU (over bf16), peak of active memory",
        ["tokens/s a GPU (over bf16), peak", *settings],
        rows,
    )


def markdown(data: dict[str, Any]) -> str:
    """The table, and below it what a reader needs to repeat it."""
    commands = "\n".join(f"- {setting}: `{command}`" for setting, command in data["settings"].items())
    where = f"<sub>`python scripts/tables/whole_run.py` · {data['machine']} · {data['date']}</sub>"
    return f"{table(data).markdown()}\n\nOne run each. {data['options']}\n\n{commands}\n\n{where}"


def draw(data: dict[str, Any], folder: Path) -> None:
    """Write ``whole_run_speed.svg`` and ``whole_run_memory.svg``."""
    subtitle = (
        f"Llama 3 8B, 8192 tokens a GPU, FSDP2 and torch.compile, {data['machine']}; {data['date']}. "
        "gradients: reduced in float8; swiglu: SwiGLU's input is saved in float8."
    )
    speeds: dict[str, dict[str, float]] = {setting: {} for setting in data["settings"]}
    memory: dict[str, dict[str, float]] = {setting: {} for setting in data["settings"]}
    for arm, settings in data["active_gib"].items():
        for setting, gib in settings.items():
            speeds[setting][arm] = over_bf16(data, arm, setting) or math.nan
            memory[setting][arm] = gib
    for name, title, values, unit in (
        ("speed", "Training speed over bf16", speeds, "{:.2f}"),
        ("memory", "Peak of active memory, GiB a GPU", memory, "{:.1f}"),
    ):
        drawing.save(drawing.bars(title, subtitle, values, unit), folder / f"whole_run_{name}.svg")


def main() -> None:
    made = parser(__doc__, "whole_run")
    made.add_argument("--images", type=Path, metavar="FOLDER", help="also draw the charts there")
    arguments = made.parse_args()
    data = read()
    table(data).show()
    if arguments.write_docs:  # without the machine and the date of today, which are not those of the runs
        write_between_markers(arguments.marker, markdown(data))
    if arguments.images:
        draw(data, arguments.images)


if __name__ == "__main__":
    main()
