"""The README's table of whole runs is that of its figures; pictures stand on a page and are drawn by a script."""

import json

from scripts.tables import data_flow, drawing, loss_curves, whole_run
from tests.docs.pages import PAGES, ROOT, links


def test_the_table_of_whole_runs_is_that_of_the_figures():
    data = whole_run.read()
    _, _, rest = (ROOT / "README.md").read_text().partition("<!-- begin whole_run -->\n")
    assert rest.partition("\n<!-- end whole_run -->")[0] == whole_run.markdown(data)


def test_every_ratio_is_of_the_same_setting():
    data = whole_run.read()
    assert whole_run.over_bf16(data, "bf16", "no checkpointing") == 1
    assert whole_run.over_bf16(data, "f8sub rowwise, swiglu", "no checkpointing") is None
    assert whole_run.over_bf16(data, "f8sub tensorwise", "no checkpointing") == 22805 / 16845


def test_pictures_are_drawn(tmp_path):
    whole_run.draw(whole_run.read(), tmp_path)
    drawing.save(data_flow.draw(), tmp_path / "data_flow.svg")
    drawing.save(loss_curves.draw(json.loads(loss_curves.DATA.read_text())), tmp_path / "loss_curves.svg")
    drawn = {path.name for path in tmp_path.iterdir()}
    there = {path.name for path in (ROOT / "docs" / "images").iterdir()}
    shown = {link.rpartition("/")[2] for page in PAGES for link in links(page)}
    assert drawn <= there <= shown
    assert all("<svg" in (tmp_path / name).read_text() for name in drawn)
