"""torch._scaled_mm against the exact product, what it is padded to for CUDA, and what it refuses."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

import f8sub
from f8sub import ALL, Float8Format, GemmSpec, Operand, ScaleRule, Tile
from f8sub.formats import E2M1
from f8sub.kernels import reference
from f8sub.kernels.gemm import measured, scaled_mm, select
from f8sub.linear.float8_linear import gemm
from tests.budgets import excess
from tests.kernels.products import (
    BLOCK,
    E4M3,
    E5M2,
    LARGE_E5M2,
    MX,
    NV,
    ONE_BYTE_PAIRS,
    PAIRS,
    ROW,
    TENSOR,
    TENSOR_E5M2,
    VECTOR,
    natively_by_rows,
    operands,
    product,
    skip_without_rows,
)

SHAPES = {"32x48x64": (32, 48, 64), "13x7x40": (13, 7, 40), "1x16x32": (1, 16, 32), "1x1x1": (1, 1, 1)}
CPU = torch.device("cpu")
on_each_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
on_each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
on_each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class Calls(TorchDispatchMode):
    """Arguments of every ``aten._scaled_mm``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten._scaled_mm:
            arguments = zip((a.name for a in func._schema.arguments), args, strict=False)
            self.seen.append({**dict(arguments), **(kwargs or {})})
        return func(*args, **(kwargs or {}))


@on_each_dtype
@on_each_shape
@on_each_pair
def test_the_product(pair, shape, dtype):
    """Of a CPU's, which accumulates in one way whatever is asked for."""
    skip_without_rows(*pair)
    assert scaled_mm.why_not(*pair, CPU) is None
    a, b = operands(pair, shape)
    found = scaled_mm.gemm_nt(a, b, dtype, fast_accum=False)
    assert found.dtype == dtype
    assert torch.equal(found, scaled_mm.gemm_nt(a, b, dtype, fast_accum=True))
    assert excess(found, product(a, b)) <= 1
    assert excess(reference.gemm_nt(a, b, dtype, False), product(a, b)) <= 1


@on_each_shape
@pytest.mark.parametrize("pair", [PAIRS["tensor-tensor"], PAIRS["e5m2-e4m3"]], ids=["e4m3", "mixed"])
def test_cpus_whose_onednn_loops_multiply_two_of_one_dtype_by_rows(monkeypatch, pair, shape):
    skip_without_rows()
    monkeypatch.setattr(scaled_mm, "_onednn_loops", lambda: True)
    a, b = operands(pair, shape)
    with Calls() as calls:
        found = scaled_mm.gemm_nt(a, b, torch.float32, fast_accum=False)
    (call,) = calls.seen
    rows = shape[:2] if pair[0] == pair[1] else (1, 1)
    assert (call["scale_a"].numel(), call["scale_b"].numel()) == rows
    assert excess(found, product(a, b)) <= 1


@pytest.mark.parametrize(
    ("amx", "fp16", "loops"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_which_cpus_those_are(monkeypatch, amx, fp16, loops):
    skip_without_rows()
    monkeypatch.setattr(scaled_mm, "cpu_has_amx", lambda: amx)
    monkeypatch.setattr(scaled_mm, "cpu_has_amx_fp16", lambda: fp16)
    assert scaled_mm._onednn_loops() == loops


def cuda_path(a, b, dtype) -> tuple[torch.Tensor, dict]:
    """``_gemm_nt_cuda`` run on the CPU, with the scales that ``gemm_nt`` hands it."""
    a_scale_inv, b_scale_inv = a.scale_inv, b.scale_inv
    if a_scale_inv.numel() > 1 or b_scale_inv.numel() > 1:
        a_scale_inv = a_scale_inv.expand(a.data.shape[0], 1).contiguous()
        b_scale_inv = b_scale_inv.expand(b.data.shape[0], 1).contiguous().t()
    with Calls() as calls:
        found = scaled_mm._gemm_nt_cuda(a.data, b.data, a_scale_inv, b_scale_inv, dtype, False)
    (call,) = calls.seen
    return found, call


@on_each_dtype
@on_each_shape
@on_each_pair
def test_what_cublaslt_is_given(pair, shape, dtype):
    skip_without_rows(*pair)
    a, b = operands(pair, shape)
    found, call = cuda_path(a, b, dtype)
    left, right = call["self"], call["mat2"]
    if shape == SHAPES["32x48x64"]:  # which is aligned: nothing is copied
        assert (left.data_ptr(), right.data_ptr()) == (a.data.data_ptr(), b.data.data_ptr())
    assert all(size % 16 == 0 for size in (*left.shape, *right.shape))
    assert left.is_contiguous()
    assert right.t().is_contiguous()
    by_row = call["scale_a"].numel() > 1 or call["scale_b"].numel() > 1
    if by_row:
        assert call["scale_a"].shape == (left.shape[0], 1)
        assert call["scale_b"].shape == (1, right.shape[1])
        assert call["out_dtype"] == torch.bfloat16
        assert call["scale_a"].isfinite().all()
        assert call["scale_b"].isfinite().all()
    # One row has one scale: the call is then a tensorwise one.
    assert by_row == any(operand.scale_inv.numel() > 1 for operand in (a, b))
    rounded = torch.bfloat16 if by_row else dtype
    assert found.dtype == dtype
    assert excess(found.to(rounded), product(a, b)) <= 1


@on_each_dtype
@on_each_shape
@pytest.mark.parametrize("pair", [PAIRS["tensor-tensor"], PAIRS["e5m2-e4m3"]], ids=["e4m3", "mixed"])
def test_whole_tensors_by_row(pair, shape, dtype):
    """One scale each, repeated: for cuBLASLt in whole multiples of 16 rows, where 16 bytes begin."""
    skip_without_rows()
    a, b = operands(pair, shape)
    found = scaled_mm.gemm_nt_by_row(a, b, dtype, fast_accum=False)
    assert excess(found, product(a, b)) <= 1
    with Calls() as calls:
        scales = scaled_mm._scales_by_row(a, b, scaled_mm.ALIGNMENT)
        found = scaled_mm._gemm_nt_cuda(a.data, b.data, *scales, dtype, False)
    (call,) = calls.seen
    for scale, operand, rows in zip((call["scale_a"], call["scale_b"].t()), (a, b), shape[:2], strict=True):
        assert scale.shape == (rows + -rows % 16, 1)
        assert scale.data_ptr() % 16 == 0
        assert (scale == operand.scale_inv).all()
    assert found.dtype == dtype
    assert excess(found.bfloat16(), product(a, b)) <= 1


def test_compiled_code_has_the_kernel_of_its_shape_or_one_node(monkeypatch):
    """The choice is in the graph where it is known; a dynamic shape is looked up when the node runs."""
    skip_without_rows()
    monkeypatch.setattr(measured, "winner", lambda *how: "by_row")
    spec = GemmSpec(a=TENSOR, b=TENSOR, fast_accum=True)
    a, b = operands((TENSOR, TENSOR), (32, 48, 64))

    def product_and_sum(*tensors):
        left, right = Operand.of(a.format, *tensors[:2]), Operand.of(b.format, *tensors[2:])
        return gemm("measured", spec, left, right, torch.bfloat16) + 1

    expected = product_and_sum(*a.tensors, *b.tensors)
    for is_dynamic, name in ((False, "_scaled_mm"), (True, "measured_gemm_nt")):
        torch.compiler.reset()
        compiled = torch.compile(product_and_sum, dynamic=is_dynamic, fullgraph=True)
        found, code = run_and_get_code(compiled, *a.tensors, *b.tensors)
        assert torch.equal(found, expected)
        assert name in "".join(code)


WHY_NOT = {
    "1x128": (Float8Format(E4M3, Tile(1, 128)), TENSOR, CPU, "not tiles of 1x128"),
    "128x128": (TENSOR, Float8Format(E4M3, Tile(128, 128)), CPU, "not tiles of 128x128"),
    "by-column": (Float8Format(E4M3, Tile(ALL, 1)), TENSOR, CPU, "not tiles of allx1"),
    "e2m1": (Float8Format(E2M1, Tile(ALL, ALL)),) * 2 + (CPU, "not tensorwise e2m1"),
    "two-e5m2": (TENSOR_E5M2, TENSOR_E5M2, CPU, "at most one e5m2"),
    "xpu": (TENSOR, TENSOR, torch.device("xpu"), "runs on cuda and cpu, not on xpu"),
}


@pytest.mark.parametrize("name", WHY_NOT)
def test_why_not(name):
    a, b, device, reason = WHY_NOT[name]
    assert reason in scaled_mm.why_not(a, b, device)
    assert select.GEMM["reference"].why_not(a, b, device) is None


def test_a_torch_without_rows_on_the_cpu_still_has_whole_tensors(monkeypatch):
    monkeypatch.setattr(scaled_mm, "_why_not_rows_on_the_cpu", lambda: "has none")
    assert scaled_mm.why_not(TENSOR, TENSOR_E5M2, CPU) is None
    assert scaled_mm.why_not(ROW, ROW, CPU) == scaled_mm.why_not(ROW, TENSOR, CPU) == "has none"
    assert scaled_mm.why_not(ROW, ROW, torch.device("xpu")) == "runs on cuda and cpu, not on xpu"


@pytest.fixture
def why_not_on(monkeypatch):
    """``why_not_on(capability, cuda, a, b)``: of such a GPU."""

    def ask(capability, cuda, a, b) -> str | None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        return scaled_mm.why_not(a, b, torch.device("cuda", 0))

    return ask


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0)], ids=str)
def test_the_gpu_has_to_be_an_ada_or_newer(why_not_on, capability):
    reason = why_not_on(capability, "13.0", TENSOR, TENSOR)
    assert reason is None if capability >= (8, 9) else f"found {capability[0]}.{capability[1]}" in reason


HOPPER = {
    "hopper": ((9, 0), "13.0", VECTOR, BLOCK, None),
    "hopper-12.9": ((9, 0), "12.9", VECTOR, VECTOR, None),
    "mixed": ((9, 0), "13.0", ROW, LARGE_E5M2, None),
    "old-cuda": ((9, 0), "12.8", VECTOR, BLOCK, "CUDA 12.9 or newer, found SM 9.0, CUDA 12.8"),
    "ada": ((8, 9), "13.0", VECTOR, BLOCK, "found SM 8.9"),
    "blackwell": ((10, 0), "13.0", VECTOR, BLOCK, "found SM 10.0"),
    "finer": ((9, 0), "13.0", Float8Format(E4M3, Tile(1, 64)), BLOCK, "per whole block of 1x128, not 1x64"),
    "no-multiple": ((9, 0), "13.0", VECTOR, Float8Format(E4M3, Tile(192, 192)), "not 192x192"),
}


@pytest.mark.parametrize("name", HOPPER)
def test_blocks_are_hoppers(why_not_on, name):
    *given, reason = HOPPER[name]
    found = why_not_on(*given)
    assert found is None if reason is None else reason in found


UNLIKE = {
    "finer": (Float8Format(E4M3, Tile(1, 16), ScaleRule.E8M0),) * 2,
    "no-multiple": (Float8Format(E4M3, Tile(1, 48), ScaleRule.E8M0),) * 2,
    "e5m2": (Float8Format(E5M2, Tile(1, 32), ScaleRule.E8M0), MX),
    "two-rules": (MX, NV),
    "one-plain": (MX, VECTOR),
    "the-other-plain": (VECTOR, MX),
}


@pytest.mark.parametrize("name", [*ONE_BYTE_PAIRS, *UNLIKE])
def test_scales_of_one_byte_are_blackwells(why_not_on, name):
    a, b = (ONE_BYTE_PAIRS | UNLIKE)[name]
    capabilities, cudas = ((9, 0), (10, 0), (12, 0)), ("12.6", "12.8", None)
    gpus = [(capability, cuda) for capability in capabilities for cuda in cudas]
    found = {gpu: why_not_on(*gpu, a, b) for gpu in gpus}
    fits = [gpu for gpu, reason in found.items() if reason is None]
    assert fits == ([((10, 0), "12.8"), ((12, 0), "12.8")] if name in ONE_BYTE_PAIRS else [])
    expected = (
        "found SM 9.0, CUDA 12.8" if name in ONE_BYTE_PAIRS else f"both operands alike, not {a} and {b}"
    )
    assert expected in found[(9, 0), "12.8"]
    assert ("not on cpu" if name in ONE_BYTE_PAIRS else expected) in scaled_mm.why_not(a, b, CPU)


def test_auto_falls_back_to_the_reference_and_a_named_backend_does_not():
    spec = GemmSpec(a=Float8Format(E4M3, Tile(1, 128)), b=Float8Format(E4M3, Tile(128, 128)))
    assert select.select_gemm(spec, CPU) == "reference"
    native = "scaled_mm" if natively_by_rows() else "reference"
    assert select.select_gemm(GemmSpec(a=ROW, b=ROW), CPU) == native
    assert select.select_gemm(GemmSpec(a=ROW, b=ROW), CPU, "reference") == "reference"
    assert select.select_gemm(GemmSpec(a=None, b=None), CPU) is None
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"no backend can multiply.*not tiles of 128x128, 1x128"
    ):
        select.select_gemm(spec, CPU, "scaled_mm")
    with pytest.raises(f8sub.Float8ConfigError, match=r"unknown backend 'cutlass'.*scaled_mm.*reference"):
        select.select_gemm(spec, CPU, "cutlass")


@pytest.mark.parametrize("backend", select.GEMM, ids=list(select.GEMM))
@on_each_pair
def test_no_rows_or_no_depth_gives_zeros(pair, backend):
    for rows, cols, depth in ((0, 16, 32), (16, 32, 0)):
        a = reference.quantize(torch.empty(rows, depth), pair[0], None)[0]
        b = reference.quantize(torch.empty(cols, depth), pair[1], None)[0]
        found = select.gemm_nt(backend, a, b, torch.bfloat16)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, torch.zeros(rows, cols, dtype=torch.bfloat16))
