"""Float8Tensor: its two usages, t(), update_usage, dequantize, flattening; and f8sub.quantize that makes it."""

import copy

import pytest
import torch

import f8sub
from f8sub import ALL, Float8Format, Float8Tensor, ScaleRule, Tile
from f8sub.formats import E2M1
from tests import oracle
from tests.data_sets import gaussian, generator, lognormal
from tests.kernels.products import E4M3, E5M2, assert_same_bits
from tests.layers import on_each_recipe
from tests.specs import spec_of

FORMATS = {
    "tensorwise": Float8Format(E4M3, Tile(ALL, ALL)),
    "rowwise": Float8Format(E4M3, Tile(1, ALL), ScaleRule.POWER_OF_2),
    "1x128": Float8Format(E4M3, Tile(1, 128)),
    "32x32-e5m2": Float8Format(E5M2, Tile(32, 32)),
    "1x32-e8m0": Float8Format(E4M3, Tile(1, 32), ScaleRule.E8M0),
    "1x16-e2m1": Float8Format(E2M1, Tile(1, 16), ScaleRule.TWO_LEVEL),
    "16x16-e2m1": Float8Format(E2M1, Tile(16, 16), ScaleRule.TWO_LEVEL),
}
on_each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
PARTS = ("data", "scale_inv", "global_scale_inv")
BUFFERS = [f"{usage}_{part}" for usage in ("rowwise", "columnwise") for part in PARTS]


def matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return lognormal((48, 160), generator(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@on_each_format
def test_dequantize(format, dtype):
    x = matrix(dtype)
    for usages, seen in (({}, x), ({"columnwise": False}, x), ({"rowwise": False}, x.t())):
        back = f8sub.quantize(x, format, **usages).dequantize()
        assert (type(back), back.dtype, back.shape) == (torch.Tensor, dtype, x.shape)
        expected = torch.from_numpy(oracle.quantize(oracle.to_numpy(seen), spec_of(format)).values)
        assert torch.equal(back, (expected if seen is x else expected.t()).float().to(dtype))


def test_asking_for_what_is_there_and_for_nothing_changes_nothing():
    tensor = f8sub.quantize(matrix(), FORMATS["1x128"])
    before = [getattr(tensor, name) for name in BUFFERS]
    tensor.update_usage()
    tensor.update_usage(rowwise=True, columnwise=True)
    assert all(getattr(tensor, name) is buffer for name, buffer in zip(BUFFERS, before, strict=True))


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "32x32-e5m2", "1x32-e8m0", "16x16-e2m1"], ids=str)
def test_deriving_a_usage(name):
    """From a weight's rowwise codes: what ``quantize(..., operand="w")`` derives."""
    format = FORMATS[name]
    gemm = f8sub.GemmSpec(a=format, b=format)
    recipe = f8sub.Recipe(name="same", fprop=gemm, dgrad=gemm, wgrad=gemm)
    weight = f8sub.quantize(matrix(), recipe, operand="w")
    derived = f8sub.quantize(matrix(), format, columnwise=False)
    derived.update_usage(columnwise=True)
    assert_same_bits(derived.columnwise, weight.columnwise)
    assert_same_bits(derived.rowwise, weight.rowwise)
    turned = f8sub.quantize(matrix(), format, columnwise=False).t()
    turned.update_usage(rowwise=True)
    assert_same_bits(turned.rowwise, weight.columnwise)


def test_a_swap_of_usages_in_one_call():
    tensor = f8sub.quantize(matrix(), FORMATS["rowwise"], columnwise=False)
    expected = f8sub.quantize(matrix(), FORMATS["rowwise"], columnwise=False)
    expected.update_usage(columnwise=True)
    tensor.update_usage(rowwise=False, columnwise=True)
    assert tensor.rowwise is None
    assert_same_bits(tensor.columnwise, expected.columnwise)


@pytest.mark.parametrize("name", ["1x128", "1x16-e2m1"], ids=str)
@pytest.mark.parametrize("wanted", ["rowwise", "columnwise"], ids=str)
def test_deriving_that_would_round_twice_is_an_error(wanted, name):
    tensor = f8sub.quantize(matrix(), FORMATS[name], **{wanted: False})
    with pytest.raises(f8sub.Float8ConfigError, match=f"cannot derive the {wanted} usage.*{wanted}=True"):
        tensor.update_usage(**{wanted: True})


def test_a_usage_of_half_a_byte_is_not_derived():
    tensor = f8sub.quantize(torch.ones(13, 16), FORMATS["16x16-e2m1"], columnwise=False)
    with pytest.raises(f8sub.Float8ShapeError, match=r"columnwise.*multiple of 2 .* they would have 13"):
        tensor.update_usage(columnwise=True)


@pytest.mark.parametrize("shape", [(0, 48), (48, 0), (0, 0)], ids=str)
@on_each_format
def test_a_matrix_of_no_elements(format, shape):
    tensor = f8sub.quantize(torch.ones(shape), format)
    for operand, of in ((tensor.rowwise, shape), (tensor.columnwise, shape[::-1])):
        assert operand.shape == of
        assert operand.scale_inv.shape == format.tile.scale_shape(of)
    assert tensor.t().dequantize().shape == shape[::-1]
    tensor.update_usage(rowwise=False)
    assert tensor.dequantize().shape == shape


@pytest.mark.parametrize(
    "dropped", [{"rowwise": False, "columnwise": False}, {"rowwise": False}], ids=["both", "the-only-one"]
)
def test_dropping_the_last_usage_is_an_error_and_changes_nothing(dropped):
    tensor = f8sub.quantize(matrix(), FORMATS["tensorwise"], columnwise=False)
    with pytest.raises(f8sub.Float8ConfigError, match="keep one of the two"):
        tensor.update_usage(**dropped)
    assert tensor.rowwise is not None


@pytest.mark.parametrize(
    "usages", [{}, {"columnwise": False}, {"rowwise": False}], ids=["both", "rowwise", "columnwise"]
)
@on_each_format
def test_flatten_and_unflatten(format, usages):
    tensor = f8sub.quantize(matrix(torch.bfloat16), format, **usages)
    names, context = tensor.__tensor_flatten__()
    buffers = {name: getattr(tensor, name) for name in names}
    assert names == [name for name in BUFFERS if getattr(tensor, name) is not None]
    again = Float8Tensor.__tensor_unflatten__(buffers, context, tensor.shape, tensor.stride())
    assert (again.shape, again.stride(), again.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    for usage in ("rowwise", "columnwise"):
        ours, theirs = getattr(again, usage), getattr(tensor, usage)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.data.data_ptr() == theirs.data.data_ptr()
            assert_same_bits(ours, theirs)


def test_it_holds_nothing_but_codes_scales_formats_and_dtype():
    tensor = f8sub.quantize(matrix(), FORMATS["rowwise"])
    assert set(vars(tensor)) == {*BUFFERS, "rowwise_format", "columnwise_format"}


@on_each_format
def test_copies_are_apart(format):
    tensor = f8sub.quantize(matrix(), format)
    for twin in (tensor.clone(), copy.deepcopy(tensor)):
        assert isinstance(twin, Float8Tensor)
        for name in tensor.__tensor_flatten__()[0]:
            assert getattr(twin, name).data_ptr() != getattr(tensor, name).data_ptr()
        assert_same_bits(twin.rowwise, tensor.rowwise)
        assert_same_bits(twin.columnwise, tensor.columnwise)


@on_each_recipe
def test_quantize_takes_parameters_and_master_weights_and_does_not_differentiate(recipe):
    layer = f8sub.convert_to_float8(torch.nn.Sequential(torch.nn.Linear(32, 48)), recipe=recipe)[0]
    values = torch.zeros(48, 32) + layer.weight.detach()
    assert type(values) is torch.Tensor
    expected = f8sub.quantize(values, recipe, operand="w")
    for source in (layer.weight, torch.nn.Parameter(values)):
        tensor = f8sub.quantize(source, recipe, operand="w")
        assert not tensor.requires_grad
        assert_same_bits(tensor.rowwise, expected.rowwise)
        assert_same_bits(tensor.columnwise, expected.columnwise)
        for name in tensor.__tensor_flatten__()[0]:
            assert type(getattr(tensor, name)) is torch.Tensor


@pytest.mark.parametrize("shape", [(13, 16), (16, 13)], ids=str)
def test_codes_that_share_a_byte_are_made_of_whole_bytes(shape):
    """A layer pads its own matrices; a Float8Tensor has the shape of what it was made of."""
    usage = "columnwise" if shape[0] % 2 else "rowwise"
    with pytest.raises(f8sub.Float8ShapeError, match=rf"rows of a multiple of 2 elements, got \({shape[0]}"):
        f8sub.quantize(torch.ones(shape), FORMATS["1x16-e2m1"])
    assert f8sub.quantize(torch.ones(shape), FORMATS["1x16-e2m1"], **{usage: False}).shape == shape


def test_quantize_of_what_the_recipe_keeps_in_high_precision_is_an_error():
    gemm = f8sub.get_recipe("tensorwise").fprop
    none = f8sub.GemmSpec(a=None, b=None)
    recipe = f8sub.Recipe(name="fprop only", fprop=gemm, dgrad=none, wgrad=none)
    assert f8sub.quantize(matrix(), recipe, operand="w").columnwise is None
    with pytest.raises(f8sub.Float8ConfigError, match="nothing to quantize"):
        f8sub.quantize(matrix(), recipe, operand="dy")


def test_quantize_reads_no_attribute_that_a_user_set():
    x = gaussian((32, 32), generator(1))
    expected = f8sub.quantize(x, "tensorwise")
    x.plain = True
    assert_same_bits(f8sub.quantize(x, "tensorwise").rowwise, expected.rowwise)


def test_neither_usage_is_an_error():
    with pytest.raises(f8sub.Float8ConfigError, match="got neither"):
        Float8Tensor(None, None, torch.float32)


@pytest.mark.parametrize(
    ("x", "usages", "error", "message"),
    [
        *((torch.ones(size), {}, f8sub.Float8ShapeError, "takes a matrix") for size in ((), 16, (2, 3, 16))),
        *(
            (torch.zeros(16, 16).to(d), {}, TypeError, str(d))
            for d in (torch.int32, torch.bool, torch.complex64)
        ),
        (matrix(), {"rowwise": False, "columnwise": False}, f8sub.Float8ConfigError, "nothing to quantize"),
    ],
)
def test_quantize_takes_matrices_of_floating_point_for_a_usage(x, usages, error, message):
    with pytest.raises(error, match=message):
        f8sub.quantize(x, FORMATS["tensorwise"], **usages)
