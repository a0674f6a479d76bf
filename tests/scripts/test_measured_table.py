"""The table of predicted and measured figures: its page shows what the script makes."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")
measured = pytest.importorskip("scripts.tables.measured")
PAGE = Path(__file__).parents[2] / "docs" / "estimate.md"


def test_the_page_shows_the_table(monkeypatch):
    written = {}
    monkeypatch.setattr("scripts.table.write_between_markers", written.__setitem__)
    monkeypatch.setattr("sys.argv", [measured.__file__, "--write-docs"])
    measured.main()
    table, _, _ = written["measured"].partition("\n\n<sub>")
    assert f"<!-- begin measured -->\n{table}\n\n<sub>" in PAGE.read_text()
