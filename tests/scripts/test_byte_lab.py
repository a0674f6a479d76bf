"""The byte gate: what compiled layers of f8sub move and save on an H200, of the code generated for one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
CLAIMED_OF_TORCHAO = {
    ("linear", "tensorwise", False): 1376e6,
    ("linear", "tensorwise", True): 1023e6,
}
"""Of torchao 0.18: 6 bytes an element of x, w and dy, 2 of w in backward."""


def figures_of(tmp_path: Path, *only: str) -> tuple[dict, str, int]:
    """By (module, library, recipe, gathered)."""
    pytest.importorskip("triton")
    output = tmp_path / "bytes.json"
    finished = subprocess.run(
        [sys.executable, str(SCRIPTS / "byte_lab.py"), "--json", str(output), "--only", *only],
        capture_output=True,
        text=True,
        timeout=1200,
        env={
            "PYTHONPATH": str(SCRIPTS.parent),
            "OMP_NUM_THREADS": "1",
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
        },
    )
    assert output.exists(), finished.stderr[-3000:]
    rows = json.loads(output.read_text())
    names = ("module", "library", "recipe", "gathered")
    return {tuple(row[name] for name in names): row for row in rows}, finished.stdout, finished.returncode


@pytest.mark.long
def test_a_linear_layer_moves_the_bytes_of_its_casts(tmp_path):
    """blockwise: x and dy are read once and written twice, w's codes and their scales read and written once."""
    figures, shown, status = figures_of(tmp_path, "linear, f8sub blockwise, weight gathered")
    (row,) = figures.values()
    x, w, y = 8192 * 4096, 14336 * 4096, 8192 * 14336
    casts, scales = 4 * (x + y) + 2 * w, 2 * 4 * (x + y) // 128 + 2 * 4 * w // 128**2
    assert row["moved"] == casts + scales, shown
    assert row["saved"] == x + 4 * x // 128
    assert row["launches"] == 3
    assert status == 0, shown


@pytest.mark.long
def test_f8sub_moves_and_saves_no_more_than_it_is_held_to(tmp_path):
    import byte_lab

    gathered = [str(byte_lab.Case(module, "f8sub", recipe, True)) for module, recipe in byte_lab.AT_MOST]
    figures, shown, status = figures_of(tmp_path, *gathered)
    print(shown)
    assert status == 0, shown
    assert len(figures) == 8


def test_what_misses_is_named():
    import byte_lab
    from inductor_lab import Buffer, Generated, Kernel, Saved

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
def test_the_lab_counts_what_is_known_of_torchao(tmp_path):
    pytest.importorskip("torchao")
    figures, shown, _ = figures_of(tmp_path, "linear, torchao tensorwise")
    for (module, recipe, gathered), moved in CLAIMED_OF_TORCHAO.items():
        found = figures[module, "torchao", recipe, gathered]["moved"]
        assert found == pytest.approx(moved, rel=0.001), shown
