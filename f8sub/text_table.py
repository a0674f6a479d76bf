"""One printer of text tables, for every page that f8sub prints, and a number with its noun."""

from collections.abc import Sequence


def plural(count: int, noun: str) -> str:
    """Return a number with its noun: "1 layer", "2 layers"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def text_table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    align: str,
    *,
    widths: Sequence[int] = (),
    gap: int = 2,
    indent: int = 0,
) -> list[str]:
    """Return the lines of a table without trailing spaces. A column is as wide as its widest cell.

    Args:
        header: the first row; empty for none.
        rows: cells, shown by ``str``. A row may have fewer than there are columns.
        align: "l" or "r" for each column.
        widths: the least width of each column, for tables that stand below one another; empty for none.
        gap: spaces between columns.
        indent: spaces before the first column.
    """
    table = [[str(cell) for cell in row] for row in ([header] if header else []) + list(rows)]
    # Columns without a least width begin at 0.
    least = [*widths, *[0] * (len(align) - len(widths))]
    for row in table:
        least = [
            max(width, len(cell))
            for width, cell in zip(least, row + [""] * (len(align) - len(row)), strict=True)
        ]
    lines = []
    for row in table:
        # A row may have fewer cells than there are columns.
        cells = zip(row, least, align, strict=False)
        padded = [cell.ljust(width) if side == "l" else cell.rjust(width) for cell, width, side in cells]
        lines.append((" " * indent + (" " * gap).join(padded)).rstrip())
    return lines
