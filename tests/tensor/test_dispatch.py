"""The operators a Float8Tensor answers: one row each; every other one raises and names itself."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import f8sub
from f8sub import ALL, Float8Format, Float8Tensor, ScaleRule, Tile
from f8sub.kernels import reference, scaled_mm
from f8sub.tensor.float8_tensor import OPS
from tests.budgets import excess
from tests.counting import Float8Work
from tests.cpu_products import skip_without_rows
from tests.data_sets import gaussian, generator, row_outliers
from tests.oracle import Product

aten = torch.ops.aten
E4M3 = torch.float8_e4m3fn
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


def test_every_operator_of_the_table_has_its_row_here():
    assert set(OPS) == {*VALUES, *TRANSPOSES, *PLAIN, *MATMULS}


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
    assert (type(made), made.shape, made.dtype, made.device.type) == (
        torch.Tensor,
        (32, 48),
        torch.bfloat16,
        "cpu",
    )
    other = PLAIN[op](tensor(), dtype=torch.float16)
    assert other.dtype == torch.float16
    assert torch.equal(torch.zeros_like(tensor()), torch.zeros(32, 48))


def exact(operand) -> np.ndarray:
    scale_inv = reference.spread(operand.scale_inv.double(), operand.format.tile, operand.data.shape)
    return (operand.data.double() * scale_inv).numpy()


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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=str)
def test_matmul_and_addmm_in_every_mode(mode):
    a, b = tensor(), tensor(shape=(48, 16))
    bias = gaussian((16,), generator(3))
    expected = a @ b
    with mode():
        found, with_bias = a @ b, torch.addmm(bias, a, b)
    assert torch.equal(found, expected)
    assert torch.equal(with_bias, bias + expected)


@on_each_format
def test_the_three_gemms_of_a_linear_layer_need_no_copies(format):
    x, w, dy = tensor(format, (32, 48), 1), tensor(format, (16, 48), 2), tensor(format, (32, 16), 3)
    with Float8Work() as work:
        y, dx, dw = x @ w.t(), dy @ w, dy.t() @ x
    assert work.matmuls == 3
    for found, a, b in (
        (y, x.rowwise, w.rowwise),
        (dx, dy.rowwise, w.columnwise),
        (dw, dy.columnwise, x.columnwise),
    ):
        assert excess(found, Product(exact(a), exact(b))) <= 1


def test_tiles_that_no_kernel_takes_run_in_the_reference():
    format = Float8Format(E4M3, Tile(1, 32))
    a, b = tensor(format), tensor(format, (48, 16))
    with Float8Work() as work:
        found = a @ b
    assert (work.scaled_matmuls, work.matmuls) == (0, 1)
    assert excess(found, Product(exact(a.rowwise), exact(b.columnwise))) <= 1


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


MIXED = {
    "mm-plain-right": lambda a, p: a @ p,
    "mm-plain-left": lambda a, p: p.t() @ a.t(),
    "linear-plain-weight": lambda a, p: F.linear(a, p.t()),
    "linear-plain-input": lambda a, p: F.linear(p.t(), a),
    "addmm": lambda a, p: torch.addmm(torch.zeros(()), a, p),
}


@pytest.mark.parametrize("name", MIXED, ids=list(MIXED))
def test_float8_with_plain_is_refused(name):
    a, plain = tensor(), gaussian((48, 16), generator(2))
    with pytest.raises(NotImplementedError, match=r"Float8Tensor and a torch.float32 tensor.*dequantize"):
        MIXED[name](a, plain)


ABSENT = {
    "aten.add.Tensor": lambda t: t + 1,
    "aten.mul.Tensor": lambda t: t * t,
    "aten.relu": lambda t: F.relu(t),
    "aten.sum": lambda t: t.sum(),
    "aten.slice.Tensor": lambda t: t[2:],
    "aten.select.int": lambda t: t[0],
    "aten.copy_": lambda t: t.copy_(torch.zeros(32, 48)),
    "aten.zero_": lambda t: t.zero_(),
    "aten.cat": lambda t: torch.cat([t, t]),
    "aten.bmm": lambda t: torch.bmm(t, t),
    "aten._softmax": lambda t: t.softmax(0),
}


@pytest.mark.parametrize("name", ABSENT, ids=list(ABSENT))
def test_an_operator_outside_the_table_names_itself(name):
    source = tensor()
    with pytest.raises(NotImplementedError, match=rf"{name}.* not defined for Float8Tensor.*dequantize"):
        ABSENT[name](source)


VIEWS = {
    "view": lambda t: t.view(48, 32),
    "view-flat": lambda t: t.view(-1),
    "as_strided-shape": lambda t: t.as_strided((16, 48), (48, 1)),
    "as_strided-strides": lambda t: t.as_strided((32, 48), (1, 32)),
    "as_strided-offset": lambda t: t.as_strided((32, 48), (48, 1), 48),
}


@pytest.mark.parametrize("name", VIEWS, ids=list(VIEWS))
def test_another_shape_is_refused(name):
    source = tensor()
    with pytest.raises(NotImplementedError, match=r"another shape|offset"):
        VIEWS[name](source)


def test_another_dtype_is_refused_and_its_own_is_itself():
    source = tensor(dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"dequantize\(\) and convert"):
        source.to(torch.float32)
    assert source.to(torch.bfloat16) is source


def test_another_device():
    moved = tensor(ROW).to("meta")
    assert isinstance(moved, Float8Tensor)
    assert (moved.device.type, moved.rowwise.data.device.type) == ("meta", "meta")
    assert moved.columnwise.scale_inv.shape == (48, 1)


def test_addmm_with_factors_is_refused():
    a, b = tensor(), tensor(shape=(48, 16))
    with pytest.raises(NotImplementedError, match=r"alpha.*only bias \+ a @ b"):
        torch.addmm(torch.zeros(16), a, b, alpha=2.0)


def test_shapes_that_do_not_fit_are_an_error():
    a, b = tensor(), tensor(shape=(32, 16))
    with pytest.raises((RuntimeError, ValueError), match=r"48|32"):
        a @ b
