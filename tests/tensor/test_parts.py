"""Rows and columns of a Float8Tensor: what a part dequantizes to is the part of what the whole does, to the bit."""

import io
import warnings

import pytest
import torch

import f8sub
from f8sub import Float8Tensor
from tests.data_sets import gaussian, generator
from tests.tensor.test_float8_tensor import FORMATS, matrix, on_each_format

ROWS, COLS = 48, 160
USAGES = {"both": {}, "rowwise": {"columnwise": False}, "columnwise": {"rowwise": False}}
on_each_usage = pytest.mark.parametrize("usages", USAGES.values(), ids=list(USAGES))
BORDERS = {
    "tensorwise": {"rowwise": (1, 1), "columnwise": (1, 1)},
    "rowwise": {"rowwise": (1, 1), "columnwise": (1, 1)},
    "1x128": {"rowwise": (1, 128), "columnwise": (128, 1)},
    "32x32-e5m2": {"rowwise": (32, 32), "columnwise": (32, 32)},
    "1x32-e8m0": {"rowwise": (1, 32), "columnwise": (32, 1)},
    "1x16-e2m1": {"rowwise": (1, 16), "columnwise": (16, 1)},
    "16x16-e2m1": {"rowwise": (16, 16), "columnwise": (16, 16)},
}
"""Each usage can be cut at multiples of so many rows and columns. The columnwise one is stored transposed."""
CASES = [(name, usage) for name in FORMATS for usage in USAGES]


def made(name: str, usage: str, shape: tuple[int, int] = (ROWS, COLS)) -> Float8Tensor:
    return f8sub.quantize(gaussian(shape, generator(1)), FORMATS[name], **USAGES[usage])


def alone(tensor: Float8Tensor, usage: str) -> Float8Tensor:
    operands = [getattr(tensor, u) if u == usage else None for u in ("rowwise", "columnwise")]
    return Float8Tensor(*operands, tensor.dtype, tensor.shape[:-1])


def assert_is_part(call, whole: Float8Tensor) -> None:
    """``call`` gives of the tensor, in each of its usages, what it gives of the usage's values."""
    part = call(whole)
    assert isinstance(part, Float8Tensor)
    for usage in ("rowwise", "columnwise"):
        operand = getattr(part, usage)
        assert (operand is None) == (getattr(whole, usage) is None)
        if operand is not None:
            assert torch.equal(alone(part, usage).dequantize(), call(alone(whole, usage).dequantize()))
            assert operand.data.is_contiguous()
            assert operand.scale_inv.shape == operand.format.tile.scale_shape(operand.shape)


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize(("name", "usage"), CASES, ids=["-".join(case) for case in CASES])
def test_every_cut_is_right_or_says_where_to_cut(name, usage, dim):
    whole = made(name, usage)
    usages = ("rowwise", "columnwise") if usage == "both" else (usage,)
    size, step = whole.shape[dim], max(BORDERS[name][u][dim] for u in usages)
    cuts = [(0, 1), (1, 4), (16, 32), (32, size), (16, size - 1), (0, size), (5, 5), (size, size)]
    for start, stop in cuts:

        def call(tensor: torch.Tensor, start: int = start, stop: int = stop) -> torch.Tensor:
            return tensor.narrow(dim, start, stop - start)

        if start == stop or all(place % step == 0 or place == size for place in (start, stop)):
            assert_is_part(call, whole)
            continue
        with pytest.raises(f8sub.Float8ShapeError, match=rf"multiples of {step}\b.*dequantize") as error:
            call(whole)
        assert ("update_usage" in str(error.value)) == (usage == "both")


@pytest.mark.parametrize("dim", [0, 1, -1], ids=str)
@pytest.mark.parametrize("size", [128, [128, 0, 32]], ids=str)
@on_each_format
def test_split_and_cat_are_each_others_inverse(format, size, dim):
    x = gaussian((COLS, COLS), generator(1))
    whole = f8sub.quantize(x, format, columnwise=False)
    for index in range(len(whole.split(size, dim))):
        assert_is_part(lambda tensor, index=index: tensor.split(size, dim)[index], whole)
    assert_is_part(lambda tensor: torch.cat(tensor.split(size, dim), dim), whole)


ROWS_OF = {
    "chunk": lambda t: t.chunk(5)[2],
    "tensor_split": lambda t: t.tensor_split(5)[4],
    "slice": lambda t: t[-3:],
    "empty": lambda t: t[7:2],
    "step": lambda t: t[3:40:7],
    "columns": lambda t: t[:, 16:32],
    "mask": lambda t: t[torch.arange(ROWS) % 5 == 0],
    "index": lambda t: t[torch.tensor([-1, 0, 7, 7])],
    "index_select": lambda t: t.index_select(1, torch.tensor([3, 1])),
    "cat": lambda t: torch.cat([t[40:], t[:7]]),
    "cat-columns": lambda t: torch.cat([t[:, 40:], t[:, :7]], -1),
    "leading": lambda t: t.view(4, 12, COLS)[1:3],
    "leading-index": lambda t: t.view(4, 12, COLS)[torch.tensor([3, 0])],
    "leading-cat": lambda t: torch.cat([t.view(4, 12, COLS)[2:], t.view(4, 12, COLS)[:1]]),
}


@pytest.mark.parametrize("name", ROWS_OF, ids=list(ROWS_OF))
@on_each_usage
def test_each_way_to_say_which_rows(usages, name):
    whole = f8sub.quantize(gaussian((ROWS, COLS), generator(1)), FORMATS["tensorwise"], **usages)
    assert_is_part(ROWS_OF[name], whole)


def test_a_row_that_is_not_there_is_an_error():
    with pytest.raises(IndexError):
        made("rowwise", "rowwise")[torch.tensor([ROWS])]


@pytest.mark.parametrize("name", ["1x128", "32x32-e5m2", "16x16-e2m1"], ids=str)
def test_single_rows_of_shared_scales_are_not_picked(name):
    usage = "columnwise" if name == "1x128" else "rowwise"
    with pytest.raises(f8sub.Float8ShapeError, match=r"no single rows to pick.*slices at multiples of \d+"):
        made(name, usage)[torch.tensor([0, 1])]


MISFITS = {
    "a scale each": (f8sub.Float8ShapeError, ("tensorwise", "rowwise"), ("tensorwise", "rowwise")),
    "a level each": (f8sub.Float8ShapeError, ("1x16-e2m1", "rowwise"), ("1x16-e2m1", "rowwise")),
    "half a tile": (f8sub.Float8ShapeError, ("32x32-e5m2", "rowwise"), ("32x32-e5m2", "rowwise")),
    "other formats": (f8sub.Float8ConfigError, ("rowwise", "rowwise"), ("1x128", "rowwise")),
    "other usages": (f8sub.Float8ConfigError, ("rowwise", "rowwise"), ("rowwise", "columnwise")),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_cannot_be_joined_says_so(name):
    error, *tensors = MISFITS[name]
    with pytest.raises(error, match=r"cannot join.*dequantize"):
        torch.cat([made(*each) for each in tensors])


def test_gradients_of_parts_and_of_the_whole_meet():
    """As of a gathered weight: what a part's gradient is goes into the whole's, in high precision."""
    weight = torch.nn.Parameter(made("rowwise", "rowwise"))
    q, k = weight.split(24)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", f8sub.Float8Warning)
        ((3 * q).sum() + (k * k).sum() + weight.pow(2).sum()).backward()
    values = weight.dequantize()
    expected = 2 * values
    expected[:24] += 3
    expected[24:] += 2 * values[24:]
    assert type(weight.grad) is torch.Tensor
    assert torch.allclose(weight.grad, expected)


@on_each_usage
@on_each_format
def test_it_is_loaded_with_weights_only(format, usages):
    """Importing f8sub is enough; so is allow-listing the class alone."""
    tensor = f8sub.quantize(matrix(torch.bfloat16), format, **usages)
    file = io.BytesIO()
    torch.save({"tensor": tensor, "parameter": torch.nn.Parameter(tensor, requires_grad=False)}, file)
    for _ in range(2):
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert isinstance(loaded["parameter"], torch.nn.Parameter)
        for found in loaded.values():
            assert (type(found), found.shape, found.dtype) == (Float8Tensor, tensor.shape, tensor.dtype)
            formats = tensor.rowwise_format, tensor.columnwise_format
            assert (found.rowwise_format, found.columnwise_format) == formats
            assert torch.equal(found.dequantize(), tensor.dequantize())
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([Float8Tensor])
