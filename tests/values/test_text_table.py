"""The printer of text tables."""

from f8sub.text_table import text_table


def test_columns_are_as_wide_as_their_widest_cells():
    lines = text_table(("name", "n"), [("q", 1), ("gate", 14336)], "lr")
    assert lines == ["name      n", "q         1", "gate  14336"]


def test_widths_gap_and_indent():
    assert text_table((), [("a", "b")], "lr", widths=(3, 3), gap=1, indent=2) == ["  a     b"]
    assert text_table((), [("longer", "b")], "lr", widths=(3,), gap=0) == ["longerb"]


def test_no_line_ends_with_spaces_and_rows_may_be_short():
    assert text_table(("a", "b", "c"), [("1",), ("", "", "")], "lll") == ["a  b  c", "1", ""]
    assert text_table(("a",), [], "l") == ["a"]
