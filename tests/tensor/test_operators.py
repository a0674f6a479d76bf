"""The operators of codes: one row each; any other reads high-precision values and says so once, or would write."""

import pytest
import torch
import torch.nn.functional as F

import f8sub
from f8sub import ALL, Float8Format, Float8Tensor, ScaleRule, Tile
from f8sub.kernels.gemm import scaled_mm
from f8sub.tensor import aten_ops
from f8sub.tensor.float8_tensor import ANY_OTHER, OPS
from tests.budgets import excess
from tests.counting import Float8Work
from tests.data_sets import gaussian, generator, row_outliers
from tests.kernels.products import E4M3, exact, skip_without_rows
from tests.oracle import Product

aten = torch.ops.aten
TENSOR = Float8Format(E4M3, Tile(ALL, ALL))
ROW = Float8Format(E4M3, Tile(1, ALL), ScaleRule.POWER_OF_2)
FORMATS = {"tensorwise": TENSOR, "rowwise": ROW}
on_each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))


def tensor(format=TENSOR, shape=(32, 48), seed=1, dtype=torch.float32, **usages) -> Float8Tensor:
    return f8sub.quantize(row_outliers(shape, generator(seed)).to(dtype), format, **usages)


def assert_same(found, expected, *, same_memory: bool) -> None:
    assert isinstance(found, Float8Tensor)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    for usage in ("rowwise", "columnwise"):
        ours, theirs = getattr(found, usage), getattr(expected, usage)
        assert ours.format == theirs.format
        assert torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8))
        assert torch.equal(ours.scale_inv, theirs.scale_inv)
        assert (ours.data.data_ptr() == theirs.data.data_ptr()) == same_memory
        assert (ours.scale_inv.data_ptr() == theirs.scale_inv.data_ptr()) == same_memory


VALUES = {
    aten.detach.default: (lambda t: t.detach(), True),
    aten.alias.default: (lambda t: aten.alias.default(t), True),
    aten.clone.default: (lambda t: t.clone(), False),
    aten._to_copy.default: (lambda t: aten._to_copy.default(t, device="cpu"), False),
    aten.view.default: (lambda t: t.view(32, 48), True),
    aten.as_strided.default: (lambda t: t.as_strided((32, 48), (48, 1)), True),
}
TRANSPOSES = {
    aten.t.default: lambda t: t.t(),
    aten.transpose.int: lambda t: t.transpose(-2, -1),
    aten.permute.default: lambda t: t.T,
}
PLAIN = {aten.zeros_like.default: torch.zeros_like, aten.empty_like.default: torch.empty_like}
MATMULS = {
    aten.mm.default: lambda a, b: torch.mm(a, b),
    aten.matmul.default: lambda a, b: a @ b,
    aten.addmm.default: lambda a, b: torch.addmm(torch.zeros(()), a, b),
    aten.linear.default: lambda a, b: F.linear(a, b.t()),
}


PARTS = {
    *(aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default),
    *(aten.index.Tensor, aten.index_select.default, aten.cat.default),
}
"""What tests/tensor has."""


def test_every_operator_of_the_table_has_its_row_here():
    assert set(OPS) == {*VALUES, *TRANSPOSES, *PLAIN, *MATMULS, *PARTS, aten.copy_.default, ANY_OTHER}


@pytest.fixture(autouse=True)
def told(monkeypatch) -> set[str]:
    """The operators that were warned about, none at first."""
    monkeypatch.setattr(aten_ops, "_warned", set())
    return aten_ops._warned


def test_a_plain_tensor_copies_from_it(told):
    source = tensor(dtype=torch.bfloat16)
    copied = torch.zeros(32, 48).copy_(source)
    assert (type(copied), copied.dtype) == (torch.Tensor, torch.float32)
    assert torch.equal(copied, source.dequantize().float())
    assert not told


@pytest.mark.parametrize("op", VALUES, ids=str)
@on_each_format
def test_the_same_value(format, op):
    call, same_memory = VALUES[op]
    source = tensor(format)
    assert_same(call(source), source, same_memory=same_memory)


@pytest.mark.parametrize("op", TRANSPOSES, ids=str)
@on_each_format
def test_transposes(format, op):
    source = tensor(format)
    turned = TRANSPOSES[op](source)
    assert turned.shape == (48, 32)
    assert turned.rowwise.data.data_ptr() == source.columnwise.data.data_ptr()
    assert turned.columnwise.data.data_ptr() == source.rowwise.data.data_ptr()


@pytest.mark.parametrize("dims", [(0, 0), (1, -1), (-2, 0)], ids=str)
def test_a_transposition_of_a_dimension_with_itself(dims):
    source = tensor()
    assert_same(source.transpose(*dims), source, same_memory=True)


@pytest.mark.parametrize("op", PLAIN, ids=str)
def test_gradients_and_buffers_are_plain(op):
    made = PLAIN[op](tensor(dtype=torch.bfloat16))
    found = type(made), made.shape, made.dtype, made.device.type
    assert found == (torch.Tensor, (32, 48), torch.bfloat16, "cpu")
    other = PLAIN[op](tensor(), dtype=torch.float16)
    assert other.dtype == torch.float16
    assert torch.equal(torch.zeros_like(tensor()), torch.zeros(32, 48))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", MATMULS, ids=str)
@on_each_format
def test_a_matmul_is_one_scaled_mm(format, op, dtype):
    skip_without_rows(format)
    a, b = tensor(format, (32, 48), 1, dtype), tensor(format, (48, 16), 2, dtype)
    scaled_mm.why_not(format, format, a.device)  # tries a product of its own, once a process
    with Float8Work() as work:
        found = MATMULS[op](a, b)
    assert (work.scaled_matmuls, work.matmuls, work.plain_matmuls, work.casts) == (1, 1, 0, [])
    assert (type(found), found.dtype) == (torch.Tensor, dtype)
    assert excess(found, Product(exact(a.rowwise), exact(b.columnwise))) <= 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=str)
@on_each_format
def test_linear_with_a_bias_reads_rows_of_both(format, mode):
    x, w = tensor(format, columnwise=False), tensor(format, (16, 48), 2, columnwise=False)
    bias = gaussian((16,), generator(3))
    with mode(), Float8Work() as work:
        found = F.linear(x, w, bias)
    assert work.matmuls == 1
    assert torch.equal(found, F.linear(x, w) + bias)
    assert excess(found, Product(exact(x.rowwise), exact(w.rowwise), bias.double().numpy())) <= 1


MISSING = {
    "mm-left": (lambda a, b: a @ b, {"rowwise": False}, {}, "rowwise"),
    "mm-right": (lambda a, b: a @ b, {}, {"columnwise": False}, "columnwise"),
    "linear-right": (lambda a, b: F.linear(a, b.t()), {}, {"columnwise": False}, "columnwise"),
}


@pytest.mark.parametrize("name", MISSING, ids=list(MISSING))
def test_a_missing_usage_is_named(name):
    call, left, right, usage = MISSING[name]
    a, b = tensor(**left), tensor(shape=(48, 16), **right)
    with pytest.raises(f8sub.Float8ConfigError, match=f"reads the {usage} usage.*{usage}=True"):
        call(a, b)


OTHERS = {
    "aten.mm.default": lambda t, p: t @ p,
    "aten.mm.default-plain-left": lambda t, p: p.t() @ t.t(),
    "aten.mm.default-linear-weight": lambda t, p: F.linear(p.t(), t),
    "aten.mm.default-linear-input": lambda t, p: F.linear(t, p.t()),
    "aten.addmm.default": lambda t, p: torch.addmm(torch.zeros(()), t, p),
    "aten.addmm.default-bias": lambda t, p: F.linear(p.t(), t, torch.ones(32)),
    "aten.addmm.default-factor": lambda t, p: torch.addmm(torch.zeros(32), t, t.t(), alpha=2.0),
    "aten.unsqueeze.default": lambda t, p: torch.bmm(t[None], p[None]),
    "aten.add.Tensor": lambda t, p: t + 1,
    "aten.mul.Tensor": lambda t, p: t * 2,
    "aten.pow.Tensor_Scalar": lambda t, p: t.pow(2).sum(),
    "aten.linalg_vector_norm.default": lambda t, p: torch.linalg.norm(t),
    "aten._foreach_norm.Scalar": lambda t, p: torch._foreach_norm([p, t])[1],
    "aten.relu.default": lambda t, p: F.relu(t),
    "aten.select.int": lambda t, p: t[3],
    "aten.stack.default": lambda t, p: torch.stack([t, t]),
    "aten.cat.default": lambda t, p: torch.cat([t, p.t()]),
    "aten.sub_.Tensor": lambda t, p: p.t().clone().sub_(t),
    "aten._to_copy.default": lambda t, p: t.to(torch.bfloat16),
    "aten.view.default": lambda t, p: t.view(48, 32),
    "aten.view.default-flat": lambda t, p: t.flatten(),
    "aten.as_strided.default": lambda t, p: t.as_strided((16, 48), (48, 1)),
    "aten.as_strided.default-strides": lambda t, p: t.as_strided((32, 48), (1, 32)),
    "aten.as_strided.default-offset": lambda t, p: t.as_strided((31, 48), (48, 1), 48),
    "aten.slice.Tensor": lambda t, p: t.view(2, 16, 48)[:, 2:3],
    "aten.transpose.int": lambda t, p: t.view(2, 16, 48).transpose(0, 1),
    "aten.index.Tensor": lambda t, p: t[torch.tensor([0, 1]), torch.tensor([3, 4])],
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode], ids=str)
@pytest.mark.parametrize("name", OTHERS, ids=list(OTHERS))
def test_any_other_operator_reads_high_precision_values_and_says_so_once(name, mode, told):
    source, plain = tensor(), gaussian((48, 32), generator(2))
    with mode():
        with pytest.warns(f8sub.Float8Warning, match=r"Float8Tensor\(.*48.*6,144|12,288 bytes") as said:
            found = OTHERS[name](source, plain)
        again = OTHERS[name](source, plain)
    expected = OTHERS[name](source.dequantize(), plain)
    assert type(found) is torch.Tensor
    assert torch.equal(found, expected)
    assert torch.equal(again, expected)
    assert name.split("-")[0] in told
    assert len(said) == len(told)


WRITES = {
    "aten.copy_.default": lambda t: t.copy_(torch.zeros(32, 48)),
    "aten.zero_.default": lambda t: t.zero_(),
    "aten.mul_.Tensor": lambda t: t.mul_(2),
    "aten._foreach_mul_.Scalar": lambda t: torch._foreach_mul_([t], 2.0),
    "aten.add.out": lambda t: torch.add(torch.zeros(32, 48), 1, out=t),
    "aten.index_put_.default": lambda t: t.__setitem__(torch.tensor([0]), torch.zeros(48)),
}


@pytest.mark.parametrize("name", WRITES, ids=list(WRITES))
def test_what_would_write_to_codes_is_refused(name):
    source = tensor()
    before = source.dequantize()
    with pytest.raises(NotImplementedError, match=rf"{name} would write to Float8Tensor.*dequantize"):
        WRITES[name](source)
    assert torch.equal(source.dequantize(), before)


def test_its_own_dtype_is_itself(told):
    source = tensor(dtype=torch.bfloat16)
    assert source.to(torch.bfloat16) is source
    assert not told


def test_another_device():
    moved = tensor(ROW).to("meta")
    assert isinstance(moved, Float8Tensor)
    assert (moved.device.type, moved.rowwise.data.device.type) == ("meta", "meta")
    assert moved.columnwise.scale_inv.shape == (48, 1)
