"""Every fault that a library can meet: what must happen then, and the tests that make it happen.

Without arguments each test is run, and the table says how many cases there were and how many went as they must; some
take minutes. With --list it is the table of tests alone.

    python scripts/fault_table.py --write-readme
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from faults import FAULTS
from tables import Table, parser, write_between_markers, write_json

ROOT = Path(__file__).parents[1]


def run(tests: list[str], report: Path) -> dict[str, Counter[str]]:
    """Test function -> outcome -> number of its cases."""
    command = [sys.executable, "-m", "pytest", "-q", *tests, f"--junit-xml={report}"]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
    found: dict[str, Counter[str]] = {test: Counter() for test in tests}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name'].partition('[')[0]}"
        outcomes = {child.tag for child in case}
        kind = (
            "failed" if outcomes & {"failure", "error"} else "skipped" if "skipped" in outcomes else "passed"
        )
        found[name][kind] += 1
    return found


def counts(found: dict[str, Counter[str]]) -> dict[str, dict[str, int]]:
    """Fault -> outcome -> number of cases."""
    return {
        fault: dict(sum((found[test] for test in tests), Counter())) for fault, (_, tests) in FAULTS.items()
    }


def table(found: dict[str, dict[str, int]] | None) -> Table:
    if found is None:
        rows = [[fault, must, ", ".join(tests)] for fault, (must, tests) in FAULTS.items()]
        return Table("Faults", ["fault", "what must happen", "tests"], rows)
    rows = [
        [fault, must, str(sum(found[fault].values())), str(found[fault].get("passed", 0))]
        for fault, (must, _) in FAULTS.items()
    ]
    return Table("Faults", ["fault", "what must happen", "cases tried", "so it was"], rows)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--list", action="store_true", help="name the tests and run none")
    arguments = made.parse_args()
    if arguments.list:
        table(None).show()
        return
    tests = sorted({test for _, tests in FAULTS.values() for test in tests})
    with tempfile.TemporaryDirectory() as folder:
        found = counts(run(tests, Path(folder, "report.xml")))
    shown = table(found)
    shown.show()
    if arguments.json:
        write_json(arguments.json, found)
    if bad := [fault for fault, outcomes in found.items() if set(outcomes) != {"passed"}]:
        sys.exit(f"not every case went as it must, or there was none: {'; '.join(bad)}")
    if arguments.write_readme:
        write_between_markers("fault_table", shown.markdown())


if __name__ == "__main__":
    main()
