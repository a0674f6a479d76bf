"""The operators of groups and experts as torch.compile sees them: schema, fake and result."""

import functools

import pytest
import torch

from f8sub.kernels import ops
from f8sub.kernels.grouped import operands
from tests.data_sets import gaussian, generator
from tests.kernels import test_ops as of_kernels


def grouped_quantization(formats, shape, usages=(True, True)):
    names = [format.name if is_made else None for format, is_made in zip(formats, usages, strict=True)]
    ends = torch.tensor([1, 1, shape[0]], dtype=torch.int32)
    first = torch.tensor([0, 1, 1], dtype=torch.int32)
    return ops.quantize_groups_as_one_node, (gaussian(shape, generator(1)), first, ends, *names, 16)


def computed_quantization(formats, shape, factors=torch.float32):
    """Of rows of a matrix that has more of them, times factors; or of SwiGLU."""
    _, (x, *groups) = grouped_quantization(formats, shape)
    if factors is None:
        both = gaussian((shape[0], 2 * shape[1]), generator(2))
        return ops.quantize_computed_as_one_node, (*both.chunk(2, 1), x, operands.GATE, *groups)
    rows = torch.randint(shape[0], (shape[0],), generator=generator(3))
    by = torch.rand(shape[0], generator=generator(4)).to(factors)
    return ops.quantize_computed_as_one_node, (torch.cat([x, x]), rows, by, operands.TAKEN, *groups)


def experts_quantization(formats, shape):
    return ops.experts_as_one_node, (gaussian((3, *shape), generator(1)), formats[0].name)


def experts_derivation(formats, shape):
    w = operands.quantize_weights(gaussian((3, *shape), generator(1)), formats[0])
    dy = gaussian((4, shape[0]), generator(2))
    tensors = w.data.contiguous(), w.scale_inv.contiguous(), dy
    return ops.derive_of_experts_as_one_node, (*tensors, formats[0].name, formats[1].name)


OF_GROUPS = {
    "groups_both": grouped_quantization,
    "groups_rowwise": functools.partial(grouped_quantization, usages=(True, False)),
    "groups_columnwise": functools.partial(grouped_quantization, usages=(False, True)),
    "taken": computed_quantization,
    "swiglu": functools.partial(computed_quantization, factors=None),
    "experts": experts_quantization,
    "experts_columnwise": experts_derivation,
}
GROUP_FORMATS = {name: pair for name, pair in of_kernels.FORMATS.items() if pair[0].codes_per_byte == 1}


@pytest.mark.parametrize(("name", "count"), [("tensorwise", 2 + 4), ("rowwise", 2 + 4), ("128x128", 4 + 4)])
def test_an_operator_of_groups_says_where_they_lie_in_codes_that_have_other_rows_alone(name, count):
    """The others lie as in x; a copy of that would be a launch of each cast."""
    operator, arguments = grouped_quantization(of_kernels.FORMATS[name], (64, 32))
    assert len(operator(*arguments)) == count


@pytest.mark.parametrize("operator", OF_GROUPS.values(), ids=list(OF_GROUPS))
@pytest.mark.parametrize("formats", GROUP_FORMATS.values(), ids=list(GROUP_FORMATS))
def test_operators_of_groups(operator, formats):
    for shape in of_kernels.SHAPES:
        of_kernels.test_the_fake_has_the_results_shapes_and_dtypes(operator, formats, shape)
    of_kernels.test_it_changes_no_argument_and_its_result_is_memory_of_its_own(operator, formats)
    of_kernels.test_opcheck_under_dynamic_shapes(operator, formats)
