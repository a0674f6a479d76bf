"""The byte gate: what layers of f8sub move and save on an H200, of the code generated for one; what keeping x costs."""

import pytest

from scripts.tables import byte_lab, keep_x
from scripts.tables.inductor_lab import Buffer, Generated, Kernel, Saved


@pytest.fixture
def figures_of(run_script):
    """Runs the lab: figures by (module, library, recipe, gathered), what it printed, and its status."""

    def run(*only: str) -> tuple[dict, str, int]:
        pytest.importorskip("triton")
        done = run_script("tables/byte_lab.py", "--only", *only, OMP_NUM_THREADS="1")
        assert done.figures is not None, done.stderr[-3000:]
        names = ("module", "library", "recipe", "gathered")
        rows = {tuple(row[name] for name in names): row for row in done.figures}
        return rows, done.stdout, done.returncode

    return run


@pytest.mark.long
def test_f8sub_moves_and_saves_no_more_than_it_is_held_to(figures_of):
    gathered = [str(byte_lab.Case(module, "f8sub", recipe, True)) for module, recipe in byte_lab.AT_MOST]
    figures, shown, status = figures_of(*gathered)
    print(shown)
    assert status == 0, shown
    assert len(figures) == 8
    # A blockwise layer reads x and dy once and writes them twice; w's codes and their scales it reads and writes once.
    row = figures["linear", "f8sub", "blockwise", True]
    x, w, y = 8192 * 4096, 14336 * 4096, 8192 * 14336
    casts, scales = 4 * (x + y) + 2 * w, 2 * 4 * (x + y) // 128 + 2 * 4 * w // 128**2
    assert row["moved"] == casts + scales
    assert row["saved"] == x + 4 * x // 128
    assert row["launches"] == 3


def test_what_misses_is_named():
    case = byte_lab.Case("FFN", "f8sub", "blockwise", True)
    kept = Saved("getitem", "float8_e4m3fn", (8192, 4096), 8192 * 4096, False)
    given = Saved("primals_1", "float8_e4m3fn", (14336, 4096), 14336 * 4096, True)
    scales = Buffer("float32", (8192, 112), 4 * 8192 * 112, True)
    good = Generated([Kernel("buf0", "generated", 1, 10**9, (scales,))], [], [kept, given])
    assert list(byte_lab.missed(case, good)) == []
    whole = Buffer("float32", (8192, 14336), 4 * 8192 * 14336, True)
    copy = Saved("permute", "float8_e4m3fn", (4096, 14336), 14336 * 4096, False)
    bad = Generated([Kernel("buf0", "generated", 1, 10**10, (whole,))], [], [copy])
    reasons = list(byte_lab.missed(case, bad))
    assert len(reasons) == 3
    for reason, part in zip(reasons, ("moves 10000 MB", "buf0 moves = float32", "permute"), strict=True):
        assert part in reason


@pytest.mark.long
def test_the_lab_counts_what_is_known_of_torchao(figures_of):
    pytest.importorskip("torchao")
    figures, shown, _ = figures_of("linear, torchao tensorwise")
    # Of torchao 0.18: 6 bytes an element of x, w and dy, 2 of w in backward.
    for gathered, moved in ((False, 1376e6), (True, 1023e6)):
        found = figures["linear", "torchao", "tensorwise", gathered]["moved"]
        assert found == pytest.approx(moved, rel=0.001), shown


@pytest.mark.parametrize("recipe", ["tensorwise", "gridquant"])
def test_eager_code_keeps_a_byte_an_element_of_x_or_none(recipe):
    found = {way: keep_x.in_eager_code(recipe, way) for way in keep_x.KEEP_X}
    scale = 4 / keep_x.SMALL**2
    assert found == {"auto": 0, "float8": 1 + scale, "high_precision": 0, "recompute": 1 + scale}


@pytest.mark.long
def test_compiled_code_saves_a_byte_an_element_of_x_less():
    pytest.importorskip("triton")
    float8, kept = (keep_x.measured("delayed", way) for way in ("float8", "high_precision"))
    x = byte_lab.TOKENS * byte_lab.WIDTH
    assert float8["saved"] - kept["saved"] == pytest.approx(x, rel=1e-3)
    assert kept["moved"] > float8["moved"]
