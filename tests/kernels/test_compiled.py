"""What the kernels compile to for sm_90a: no spills, wide accesses, tensor cores."""

import functools

import pytest

from tests.kernels.interpreted import needs_triton

pytestmark = needs_triton


@pytest.mark.long
def test_every_kernel():
    from tests.kernels.compiled import cases, compiler, kernels

    found = compiler.of_all(kernels.report, cases.cases(cases.WHOLE))
    assert len({row["kernel"] for row in found}) == 29
    assert [row for row in found if row["missed"]] == []
    for row in found:
        assert row["byte_loads"] == 0 or row["kernel"] == "quantize_group_exponents"
        # The second launch of amaxes is of matrices whose lines begin anywhere; a table of groups is small.
        narrow = row["kernel"] == "lay_out" or (row["kernel"], row["index"]) == ("amaxes_of_many", 1)
        assert row["wide_loads"] > 0 or narrow
        assert (row["transposed"] > 0) == row["transposes"]
        assert row["usages"] != "row" or not row["transposes"]


@pytest.mark.long
def test_casts_that_compute_swiglu():
    """Wide loads, of all that is read; few registers are spilled, and none where one scale is of all that is cast."""
    import re

    import torch

    from f8sub.kernels import cuda
    from f8sub.kernels.grouped.operands import BOTH, EACH, GATE, RESULT, UP, Gated
    from scripts.bench.formats import FORMATS
    from tests.kernels.compiled import compiler

    gate, up = torch.empty(8192, 2 * 768, dtype=torch.bfloat16, device="meta").chunk(2, 1)
    ends = torch.empty(128, dtype=torch.int32, device="meta")
    reads = {RESULT: 2, UP: 2, GATE: 3, BOTH: 3, EACH: 3}
    for name in ("tensorwise", "rowwise", "1x128", "256x256 e5m2"):
        for side in reads if name in ("tensorwise", "rowwise") else (RESULT, BOTH):
            dh = None if side == RESULT else torch.empty(8192, 768, dtype=torch.bfloat16, device="meta")
            gated = Gated(gate, up, dh, side)
            launch = cuda.token_launches(
                gated.empty(), ends, FORMATS[name], FORMATS[name], 256, gated
            ).launches[1]
            sass, _ = compiler.disassembled(compiler.compiled(launch).asm["cubin"])
            spilled = len(re.findall(r"\b(?:LDL|STL)\b", sass))
            assert spilled <= (0 if name == "tensorwise" and side != EACH else 60), (name, side, spilled)
            tile = launch.arguments["TILE"]
            wide = reads[side] * tile.ROWS * tile.COLS * 2 // (16 * 32 * launch.options["num_warps"])
            assert len(re.findall(r"\bLDG\S*\.128\b", sass)) >= wide, (name, side)


@pytest.mark.long
def test_casts_that_look_up_rows():
    """Wide loads, as of rows that lie side by side; few registers are spilled, and none without factors."""
    import re

    import torch

    from f8sub.kernels import cuda
    from f8sub.kernels.grouped.operands import Taken
    from scripts.bench.formats import FORMATS
    from tests.kernels.compiled import compiler

    x = torch.empty(16384, 2048, dtype=torch.bfloat16, device="meta")
    rows = torch.empty(131072, dtype=torch.int64, device="meta")
    ends = torch.empty(128, dtype=torch.int32, device="meta")
    for name in ("tensorwise", "rowwise", "1x128", "256x256 e5m2"):
        for factors in (None, torch.empty(131072, device="meta")):
            taken = Taken(x, rows, factors)
            made = cuda.token_launches(taken.empty(), ends, FORMATS[name], FORMATS[name], 256, taken)
            launch = made.launches[1]
            sass, _ = compiler.disassembled(compiler.compiled(launch).asm["cubin"])
            spilled = len(re.findall(r"\b(?:LDL|STL)\b", sass))
            assert spilled <= (0 if factors is None else 60), (name, spilled)
            tile = launch.arguments["TILE"]
            wide = tile.ROWS * tile.COLS * 2 // (16 * 32 * launch.options["num_warps"])
            assert len(re.findall(r"\bLDG\S*\.128\b", sass)) >= wide, name


@pytest.mark.long
def test_copies_of_gradients():
    """Wide accesses alone: 4096 elements by 256 threads are 2 loads of 16 bytes each in bfloat16, 4 in float32."""
    import re

    import torch

    from f8sub.kernels import chunk_cat
    from tests.kernels.compiled import compiler

    source = torch.empty(14336 * 4096, dtype=torch.bfloat16, device="meta")
    out = torch.empty(2 * source.numel(), device="meta")
    launch = chunk_cat.launching(source, out, 2, source.numel() // 2, source.numel())
    sass, usage = compiler.disassembled(compiler.compiled(launch).asm["cubin"])
    assert "LOCAL:0" in usage
    assert re.findall(r"\b(?:LDG|STG|LDL|STL)[\w.]*", sass) == ["LDG.E.128"] * 2 + ["STG.E.128"] * 4


@pytest.mark.long
@pytest.mark.parametrize("capability", [89, 100, 120])
def test_kernels_run_on_ada_and_blackwell(capability):
    """They compile, and their shared memory is no more than there is: those that use the most, and paired ones.

    Ada has no instruction for the maxima of pairs.
    """
    from tests.kernels.compiled import cases, compiler, kernels

    most = "1x128 bf16", "tensorwise bf16", "256x256 fp32 both"
    fits = functools.partial(kernels.fits, capability=capability)
    assert set(compiler.of_all(fits, cases.cases(cases.WHOLE), *most)) == {None}


@pytest.mark.long
def test_a_miss_is_told():
    """A matrix whose rows begin at odd places cannot be read by 128 bits."""
    from tests.kernels.compiled import cases, compiler, kernels

    (row,) = compiler.of_all(kernels.report, cases.cases((8192, 4095)), "128x128 bf16 row")
    assert any("128-bit loads" in reason for reason in row["missed"])


def assert_products_of_tensor_cores(found: list[dict]) -> None:
    assert [row for row in found if row["missed"]] == []
    assert [row for row in found if (row["resized"] > 0) != row["persistent"]] == []


@pytest.mark.long
def test_gemms_of_blockwise_and_of_a_gradient_in_e5m2():
    """Of every tile and dtype."""
    from tests.kernels.compiled import compiler, gemms

    found = compiler.of_all(gemms.report, gemms.cases(), "1x128 x", "256x256 e5m2")
    assert len(found) == 24
    assert_products_of_tensor_cores(found)


@pytest.mark.long
def test_products_by_groups():
    """Of the recipes' formats."""
    from tests.kernels.compiled import compiler, grouped

    pairs = "rowwise; fast, rowwise; tensorwise; fast, tensorwise e5m2; 1x128 x 128x128; 1x128 x 1x128"
    words = (f"{how} rows, {pair} -> bf16" for pair in pairs.split("; ") for how in ("by", "over"))
    found = compiler.of_all(grouped.report, grouped.cases(), *words)
    assert len(found) == 56
    assert_products_of_tensor_cores(found)


def test_a_register_that_was_lost_is_told_from_one_that_is_not_read():
    from tests.kernels.compiled import compiler

    lines = {
        "LDC R1, c[0x0][0x28]": 0,
        "PRMT R8, R8, 0x100, R1.reuse": 0,
        "PRMT R8, R1, 0x7654, R9": 0,
        "PRMT R8, R8, 0x5410, R1": 1,
        "PRMT R8, R1.reuse, 0x7632, R9": 1,
        "PRMT R8, R8, R9, R1": 1,
        "IADD3 R1, R1, -0x10, RZ": 1,
        "STG.E desc[UR4][R2.64], R10": 0,
        "LOP3.LUT R6, R1, 0xff, RZ, 0xc0, !PT": 1,
    }
    sass = "\n".join(
        f"        /*{16 * place:04x}*/                   {line} ;" for place, line in enumerate(lines)
    )
    assert [compiler.undefined(line) for line in sass.splitlines()] == list(lines.values())
    assert compiler.undefined(sass) == sum(lines.values())
