"""Tables of errors: what they claim, and that their figures are what they are called; and how a page has a table."""

import math

import pytest
import torch

import f8sub
from f8sub.kernels import reference
from scripts.table import ROOT, Table, write_between_markers
from scripts.tables import recipe_errors, reencoding
from scripts.tables.numerics import errors, flushed

IMBALANCED = recipe_errors.DATA_SETS["token-imbalanced gradients"]


def median_row(recipe: str, product: str, seed: int) -> float:
    figures = recipe_errors.measure(recipe_errors.recipes()[recipe], IMBALANCED, seed)
    return figures[product]["median_row_sqnr"]


@pytest.mark.parametrize("seed", range(3))
def test_a_scale_a_token_keeps_the_gradients_of_small_tokens_and_one_e4m3_scale_for_all_loses_them(seed):
    """And the whole product hides what the median row shows."""
    assert min(median_row(recipe, "dx", seed) for recipe in ("rowwise", "blockwise")) >= 28
    assert median_row("tensorwise", "dx", seed) >= 24
    recipe = recipe_errors.recipes()[recipe_errors.E4M3_GRADIENTS]
    dx = recipe_errors.measure(recipe, IMBALANCED, seed)["dx"]
    assert dx["sqnr"] >= 28
    assert dx["median_row_sqnr"] < 10


def test_the_tables_have_every_recipe_on_every_data_set(monkeypatch):
    monkeypatch.setattr(recipe_errors, "TOKENS", 64)
    results = recipe_errors.report()
    recipes = [*f8sub.recipe_names(), recipe_errors.E4M3_GRADIENTS]
    assert len(results) == 5
    assert all([row[0] for row in table.rows] == recipes for table in recipe_errors.tables(results))
    markdown = recipe_errors.markdown(results)
    assert all(name in markdown for name in (*recipes, *results))


def test_errors_of_a_known_error():
    """A row off by 1 % is 40 dB, one off by 10 % is 20 dB, an exact one infinite; a zero row is left out."""
    true = torch.tensor([[1.0, -1.0]] * 3 + [[2.0, 2.0], [0.0, 0.0]])
    found = true * torch.tensor([1.01, 1.01, 1.1, 1.0, 1.0])[:, None]
    figures = errors(true, found)
    assert figures["median_row_sqnr"] == pytest.approx(40, abs=1e-3)
    noise = 2 * 0.01**2 * 2 + 2 * 0.1**2
    assert figures["sqnr"] == pytest.approx(10 * math.log10((6 + 8) / noise), abs=1e-3)


def test_flushed_counts_what_was_not_zero():
    format = f8sub.Float8Format(torch.float8_e4m3fn, f8sub.Tile(1, f8sub.ALL))
    # 448 / 2**20 rounds to zero beside 448; half the smallest subnormal ties to zero, more than that does not.
    values = torch.tensor([[448.0, 448 / 2**20, 0.0, 2.0**-10, 1.01 * 2.0**-10]])
    operand = reference.quantize(values, format, None)[0]
    assert flushed(operand, values) == pytest.approx(2 / 5)


def test_every_recipe_that_rescales_is_measured():
    reencoded = reencoding.report()
    measured = [name for recipes in reencoded for name in recipes.split(", ")]
    assert {"rowwise w", "rowwise x", "mxfp8 w", "mxfp8 x", "blockwise x"} <= set(measured)
    assert not {"tensorwise x", "blockwise w", "nvfp4 x"} & set(measured)
    assert all(len(found) == 5 for found in reencoded.values())


def test_a_table_goes_between_its_markers_and_nothing_else_changes(tmp_path):
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    (page.parent / "another.md").write_text("no markers\n")
    page.write_text("before\n<!-- begin it -->\nold\n<!-- end it -->\nafter\n")
    table = Table("title", ["", "number"], [["a", "1"], ["b", "2"]])
    for _ in range(2):
        write_between_markers("it", table.markdown(), tmp_path)
        expected = "|  | number |\n| --- | ---: |\n| a | 1 |\n| b | 2 |"
        assert page.read_text() == f"before\n<!-- begin it -->\n{expected}\n<!-- end it -->\nafter\n"


BEGIN, END = "<!-- begin it -->\n", "<!-- end it -->\n"


@pytest.mark.parametrize("content", ["", BEGIN, END + BEGIN, (BEGIN + END) * 2])
def test_a_page_without_the_markers_is_left_alone(tmp_path, content):
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(content)
    with pytest.raises(ValueError, match="begin it"):
        write_between_markers("it", "text", tmp_path)
    assert page.read_text() == content


def test_the_page_of_predicted_and_measured_figures_shows_what_the_script_makes(monkeypatch):
    pytest.importorskip("transformers")
    measured, written = pytest.importorskip("scripts.tables.measured"), {}
    monkeypatch.setattr("scripts.table.write_between_markers", written.__setitem__)
    monkeypatch.setattr("sys.argv", [measured.__file__, "--write-docs"])
    measured.main()
    table, _, _ = written["measured"].partition("\n\n<sub>")
    assert (
        f"<!-- begin measured -->\n{table}\n\n<sub>"
        in (ROOT / "docs" / "measurements" / "predictions.md").read_text()
    )
