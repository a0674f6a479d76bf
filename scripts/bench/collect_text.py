"""Text for long runs on a machine without a network: the Python sources of the packages that are installed there.

One JSON line with ``text`` and ``path`` a file, which ``--data.source`` of recipes/pretrain.py reads, in an order that
depends on the paths alone. Sources that are no UTF-8, empty or over 200 kB, mostly generated code, are left out.

    python scripts/bench/collect_text.py sources.jsonl --megabytes 200
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from pathlib import Path

import tyro

LARGEST = 200_000


def main(out: tyro.conf.Positional[Path], megabytes: float = 200.0) -> None:
    root = Path(sysconfig.get_path("purelib"))
    files = {str(path.relative_to(root)): path for path in root.rglob("*.py")}
    order = sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())
    size = count = 0
    with out.open("w", encoding="utf-8") as lines:
        for name in order:
            try:
                text = files[name].read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if not 0 < len(text) <= LARGEST:
                continue
            lines.write(json.dumps({"path": name, "text": text}) + "\n")
            size, count = size + len(text), count + 1
            if size >= megabytes * 1e6:
                break
    print(f"{out}: {count} files, {size / 1e6:.1f} MB of text")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
