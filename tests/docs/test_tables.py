"""Tables between markers name the script that writes them, the machine, and the date."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = re.compile(r"<!-- begin (\w+) -->\n(.*?)<!-- end \1 -->", re.DOTALL)
TABLES = {
    name: text
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for name, text in TABLE.findall(page.read_text())
}
OF_THE_CODE = {"folders", "flow_1", "flow_2", "flow_3"}
"""No machine measured them: tests compare them with the code."""


@pytest.mark.parametrize("name", TABLES)
def test_a_table_names_its_script(name):
    command = re.search(r"<sub>`python ([\w/.]+)", TABLES[name])
    assert command, TABLES[name][-200:]
    assert name in (ROOT / command[1]).read_text() or name in OF_THE_CODE


@pytest.mark.parametrize("name", sorted(TABLES.keys() - OF_THE_CODE))
def test_a_table_names_its_machine_and_its_date(name):
    text = TABLES[name]
    assert re.search(r"` · [^·]+, torch [\d.]+.* · 20\d\d-\d\d-\d\d</sub>\n$", text), text[-200:]


def test_every_script_that_writes_a_table_has_its_markers():
    scripts = (ROOT / "scripts").rglob("*.py")
    written = {name for path in scripts for name in re.findall(r'parser\(__doc__, "(\w+)"', path.read_text())}
    assert written <= TABLES.keys()
    assert len(written) > 5
