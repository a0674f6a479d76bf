"""Put one fault at a time into a copy of the library and see whether the tests of that area fail.

    python scripts/planted_faults.py                    # all faults of planted_faults.toml
    python scripts/planted_faults.py --only scale wire  # those whose names contain one of the words
    python scripts/planted_faults.py --list

A fault that no test notices is a hole in the tests. Ends with status 1 where more than --allowed faults are missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
COPIED = (
    *("f8sub", "tests", "recipes", "scripts", "docs", ".ci", "pyproject.toml", "constraints.txt"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "mkdocs.yml", "findings"),
)
"""All that tests read."""
SECONDS = 600
"""After which the tests of one fault are ended: a fault that makes ranks wait for ever counts as caught."""


@dataclass(frozen=True)
class Fault:
    """One wrong line."""

    name: str  # what is wrong, in words
    file: str  # below the root
    old: str  # occurs once in the file
    new: str
    tests: tuple[str, ...]  # arguments of pytest that should fail then

    def planted(self, source: str) -> str:
        """The file's text with the fault in it."""
        if (count := source.count(self.old)) != 1:
            raise SystemExit(f"{self.name}: {self.old!r} occurs {count} times in {self.file}, not once")
        return source.replace(self.old, self.new)


def faults() -> list[Fault]:
    listed = tomllib.loads((ROOT / "scripts" / "planted_faults.toml").read_text())["fault"]
    return [Fault(**{**fault, "tests": tuple(fault["tests"].split())}) for fault in listed]


def copy_of_the_project(folder: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def verdict(fault: Fault, folder: Path) -> tuple[str, str]:
    """("caught" | "missed" | "broken", the first failing test or what went wrong)."""
    file = folder / fault.file
    source = file.read_text()
    file.write_text(fault.planted(source))
    variables = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not long", "--tb=line", *fault.tests]
    try:
        how = {"env": {**os.environ, **variables}, "capture_output": True, "text": True, "timeout": SECONDS}
        done = subprocess.run(command, cwd=folder, **how)
    except subprocess.TimeoutExpired:
        return "caught", f"the tests did not end within {SECONDS} s"
    finally:
        file.write_text(source)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 1 and failed:
        return "caught", failed[0].partition(" ")[2].partition(" ")[0]
    if done.returncode == 0:
        return "missed", ""
    return "broken", (done.stdout + done.stderr)[-800:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="words, one of which a fault's name contains")
    parser.add_argument("--jobs", type=int, default=2, help="faults tried at once (2)")
    parser.add_argument("--allowed", type=int, default=0, help="faults that may be missed (0)")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    options = parser.parse_args()
    chosen = [fault for fault in faults() if any(word in fault.name for word in options.only)]
    for fault in chosen:
        fault.planted((ROOT / fault.file).read_text())
    if options.list:
        print("\n".join(f"{fault.file}: {fault.name}" for fault in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="planted-") as scratch:
        free: Queue[Path] = Queue()
        for job in range(options.jobs):
            free.put(copy_of_the_project(Path(scratch) / str(job)))

        def tried(fault: Fault) -> str:
            folder, begun = free.get(), time.monotonic()
            try:
                found, where = verdict(fault, folder)
            finally:
                free.put(folder)
            print(f"{found}  {time.monotonic() - begun:5.0f} s  {fault.name}  {where}", flush=True)
            return found

        with ThreadPoolExecutor(options.jobs) as pool:
            found = list(pool.map(tried, chosen))
    print(
        f"{found.count('caught')} of {len(found)} faults caught, {found.count('broken')} could not be tried"
    )
    return int(len(found) - found.count("caught") > options.allowed)


if __name__ == "__main__":
    sys.exit(main())
