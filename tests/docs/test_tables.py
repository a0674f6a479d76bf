"""Tables between markers name script, machine and date; README.md has its figures; pictures stand on a page."""

import json
import re

import pytest

import f8sub
from scripts.tables import data_flow, drawing, loss_1b, loss_curves, whole_run
from tests.docs.pages import PAGES, ROOT, links

TABLE = re.compile(r"<!-- begin (\w+) -->\n(.*?)<!-- end \1 -->", re.DOTALL)
TABLES = {
    name: text
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for name, text in TABLE.findall(page.read_text())
}
OF_THE_CODE = {"map", "rooms", "flow_1", "flow_2", "flow_3", "counted"}
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


def test_the_tables_of_whole_runs_are_those_of_the_figures():
    for marker, text in whole_run.markdown(whole_run.read()).items():
        assert TABLES[marker] == f"{text}\n"


def test_every_ratio_is_of_the_same_setting():
    data = whole_run.read()
    assert whole_run.over(data, "bf16", "no checkpointing") == 1
    assert whole_run.over(data, "f8sub tensorwise", "no checkpointing") is None
    assert whole_run.over(data, "f8sub tensorwise, gradients", "no checkpointing") == 12803 / 9430
    assert (
        whole_run.over(data, "f8sub tensorwise", "selective checkpointing", whole_run.PEER) == 11615 / 11055
    )


def test_the_readmes_table_has_the_default_first_and_no_options():
    """An option that changes numbers is in no row of the table that a reader sees first, and no cell is empty."""
    table = whole_run.default_table(whole_run.read())
    assert table.rows[0][0] == "**f8sub tensorwise** (default)"
    assert not [cell for row in table.rows for cell in row if "," in row[0] or cell == "-"]
    assert len(whole_run.options_table(whole_run.read()).rows) == 5


def costs(recipe: str) -> list[float]:
    """Per cent of the default's throughput that a recipe lost, in each table of whole runs that has both."""
    found = []
    for page in ("several_gpus", "whole_runs"):
        for table in (ROOT / f"docs/measurements/{page}.md").read_text().split("\n\n"):
            rows = re.findall(r"^\| f8sub `(\w+)` \| ([\d,]+) \(", table, re.MULTILINE)
            speeds = {name: int(speed.replace(",", "")) for name, speed in rows}
            if {recipe, "tensorwise"} <= speeds.keys():
                found.append(100 - 100 * speeds[recipe] / speeds["tensorwise"])
    return found


@pytest.mark.parametrize("recipe", ["rowwise", "gridquant"])
def test_what_a_recipe_costs_is_what_was_measured(recipe):
    for page in ("README.md", "docs/recipes.md"):
        (row,) = re.findall(rf"^\|.*`{recipe}` \|.*% of speed.*$", (ROOT / page).read_text(), re.MULTILINE)
        least, most = map(int, re.search(r"(\d+) to (\d+) % of speed", row).groups())
        assert round(min(costs(recipe))) == least
        assert all(least <= round(cost) <= most for cost in costs(recipe))


def test_what_blackwell_is_predicted_to_gain_is_what_pages_say():
    found = f8sub.estimate("llama3-8b")
    # Launched steps are limited by the host, whatever the recipe.
    speeds = {name: found.of("B200", name).replayed for name in ("mxfp8", "nvfp4", "tensorwise")}
    assert speeds["mxfp8"] < 1 < speeds["nvfp4"] < speeds["tensorwise"]
    for page, words in {
        "README.md": "`mxfp8` has no fast cast kernels yet, and `inspect` predicts it slower than bf16",
        "docs/estimate.md": "on Blackwell `mxfp8` is predicted slower than bf16, and `nvfp4` slower than `tensorwise`",
    }.items():
        assert words in " ".join((ROOT / page).read_text().split())


def test_pictures_are_drawn(tmp_path):
    whole_run.draw(whole_run.read(), tmp_path)
    drawing.save(loss_1b.draw(), tmp_path / "loss_1b.svg")
    drawing.save(data_flow.draw(), tmp_path / "data_flow.svg")
    drawing.save(loss_curves.draw(json.loads(loss_curves.DATA.read_text())), tmp_path / "loss_curves.svg")
    drawn = {path.name for path in tmp_path.iterdir()}
    there = {path.name for path in (ROOT / "docs" / "images").iterdir()}
    shown = {link.rpartition("/")[2] for page in PAGES for link in links(page)}
    assert drawn <= there <= shown
    assert all("<svg" in (tmp_path / name).read_text() for name in drawn)
