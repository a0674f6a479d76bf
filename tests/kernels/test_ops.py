"""The operators as torch.compile sees them: schema, fake and result."""

import functools

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from f8sub import ALL, Float8Format, Operand, ScaleRule, Tile
from f8sub.formats import E2M1
from f8sub.kernels import ops, reference, scales
from f8sub.kernels.gemm import select
from f8sub.kernels.gemm.block_scales import unflat
from f8sub.kernels.quantize import derive_columnwise_in_backward, quantize, small_part_of
from tests.data_sets import gaussian, generator

E4M3 = torch.float8_e4m3fn
FORMATS = {
    "tensorwise": (Float8Format(E4M3, Tile(ALL, ALL)),) * 2,
    "rowwise": (Float8Format(E4M3, Tile(1, ALL), ScaleRule.POWER_OF_2),) * 2,
    "1x128": (Float8Format(E4M3, Tile(1, 128), ScaleRule.POWER_OF_2),) * 2,
    "128x128": (Float8Format(E4M3, Tile(128, 128)),) * 2,
    "1x32-e8m0": (Float8Format(E4M3, Tile(1, 32), ScaleRule.E8M0),) * 2,
    "16x16-e2m1": (Float8Format(E2M1, Tile(16, 16), ScaleRule.TWO_LEVEL),) * 2,
    "1x128-by-128x1": (Float8Format(E4M3, Tile(1, 128)), Float8Format(E4M3, Tile(128, 1))),
}
SHAPES = [(48, 160), (16, 16), (2, 32), (32, 2)]
on_each_format = pytest.mark.parametrize("formats", FORMATS.values(), ids=list(FORMATS))
on_each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


def made(formats, shape) -> Operand:
    return reference.quantize(gaussian(shape, generator(1)), formats[0], None)[0]


def derivation(formats, shape):
    operand = made(formats, shape)
    dy = gaussian((4, shape[0]), generator(2))
    return ops.derive_columnwise, (operand.data, operand.scale_inv, dy, formats[0].name, formats[1].name)


def copy(formats, shape):
    operand = made(formats, shape)
    return ops.copy_after, (operand.scale_inv, gaussian((4, shape[0]), generator(2)))


def quantization(formats, shape, usages=slice(None)):
    names = [None, None]
    names[usages] = [format.name for format in formats][usages]
    return ops.quantize_as_one_node, (gaussian(shape, generator(1)), None, *names)


def multiplication(formats, shape):
    operand = made(formats, shape)
    name = operand.format.name
    tensors = list(operand.tensors)
    return torch.ops.f8sub.reference_gemm_nt.default, (tensors, tensors, name, name, torch.bfloat16, False)


OPERATORS = {
    "derive_columnwise": derivation,
    "copy_after": copy,
    "quantize_both": quantization,
    "quantize_rowwise": functools.partial(quantization, usages=slice(0, 1)),
    "quantize_columnwise": functools.partial(quantization, usages=slice(1, 2)),
    "gemm_nt": multiplication,
}
on_each_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=list(OPERATORS))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    # Not contiguous(): one column of scales counts as that with any strides.
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def leaves(found) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]


@on_each_shape
@on_each_format
@on_each_operator
def test_the_fake_has_the_results_shapes_and_dtypes(operator, formats, shape):
    """opcheck's own comparison; it needs isclose for the rest, which not every dtype of codes has."""
    op, args = operator(formats, shape)
    checks = ("test_faketensor", "test_autograd_registration")
    assert set(torch.library.opcheck(op, args, test_utils=checks).values()) == {"SUCCESS"}
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = op(*torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, args))
    real = [(t.shape, t.dtype, t.stride()) for t in leaves(op(*args))]
    assert [(t.shape, t.dtype, t.stride()) for t in leaves(fakes)] == real


@on_each_format
@on_each_operator
def test_opcheck_under_dynamic_shapes(operator, formats):
    op, args = operator(formats, (48, 160))
    found = torch.library.opcheck(op, args, test_utils=("test_aot_dispatch_dynamic",))
    assert found == {"test_aot_dispatch_dynamic": "SUCCESS"}


@on_each_format
@on_each_operator
def test_it_changes_no_argument_and_its_result_is_memory_of_its_own(operator, formats):
    op, args = operator(formats, (48, 160))
    given = leaves(args)
    before = [bits(arg).clone() for arg in given]
    results = leaves(op(*args))
    for arg, copy in zip(given, before, strict=True):
        assert torch.equal(bits(arg), copy)
        assert arg._version == 0
    pointers = [t.untyped_storage().data_ptr() for t in results]
    assert len(set(pointers)) == len(pointers)
    assert not {t.untyped_storage().data_ptr() for t in given} & set(pointers)


@on_each_shape
@on_each_format
def test_derivation_is_the_references(formats, shape):
    op, args = derivation(formats, shape)
    operand = made(formats, shape)
    data, *scales = op(*args)
    expected = reference.derive_columnwise(operand, formats[1])
    assert torch.equal(bits(data), bits(expected.data))
    # One scale of a whole matrix is that of both usages, and comes with the rowwise one.
    assert bool(scales) == (not formats[0].tile.is_whole)
    derived = unflat(Operand(data, scales[0] if scales else operand.scale_inv, formats[1]))
    assert torch.equal(bits(derived.scale_inv), bits(expected.scale_inv))
    eager = derive_columnwise_in_backward(operand, formats[1], args[2])
    assert torch.equal(bits(eager.data), bits(expected.data))
    assert eager.format == formats[1]


@on_each_shape
@on_each_format
def test_quantization_and_product_are_the_references(formats, shape):
    x = gaussian(shape, generator(1))
    for row, col in ((formats[0], formats[1]), (formats[0], None), (None, formats[1])):
        for ours, right in zip(ops.quantized(x, row, col), reference.quantize(x, row, col), strict=True):
            assert (ours is None) == (right is None)
            if ours is not None:
                pairs = zip(unflat(ours).tensors, right.tensors, strict=True)
                assert all(torch.equal(bits(a), bits(b)) for a, b in pairs)
                assert ours.format == right.format
    operand = made(formats, shape)
    for given in (operand, ops.quantized(x, formats[0], None)[0]):
        found = select._ONE_NODE["reference"](given, given, torch.float32, False)
        assert torch.equal(found, reference.gemm_nt(operand, operand, torch.float32, False))


@pytest.mark.parametrize(
    ("name", "any_layout", "tied"),
    [
        ("tensorwise", False, "derive_columnwise"),
        ("rowwise", False, "derive_columnwise"),
        ("rowwise", True, "copy_after"),
        ("128x128", True, "derive_columnwise"),
    ],
)
def test_dy_keeps_it_in_the_backward_graph(name, any_layout, tied):
    """Traced, an operator that all of the result depends on takes dy: no partitioner can compute it in forward."""
    (format, columnwise), graphs = FORMATS[name], []
    operand = made(FORMATS[name], (48, 160))

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    def backward(dy):
        derived = derive_columnwise_in_backward(operand, columnwise, dy, any_layout)
        return derived.data, derived.scale_inv

    torch._dynamo.reset()
    data, scale_inv = torch.compile(backward, backend=keep, fullgraph=True)(gaussian((4, 48), generator(2)))
    expected = reference.derive_columnwise(operand, columnwise)
    assert torch.equal(bits(data), bits(expected.data))
    assert torch.equal(scale_inv.flatten(), expected.scale_inv.flatten())
    assert operand.format == format
    (graph,) = graphs
    nodes = list(graph.graph.nodes)
    (dy,) = [n for n in nodes if n.op == "placeholder" and n.meta["example_value"].shape == (4, 48)]
    (node,) = [n for n in nodes if tied in str(n.target)]
    assert dy in node.args
    depending = {node}
    for following in nodes:
        if depending.intersection(following.all_input_nodes):
            depending.add(following)
    (output,) = [n for n in nodes if n.op == "output"]
    assert depending.issuperset(output.all_input_nodes)


def test_only_a_small_part_of_dy_is_handed_over():
    dy = gaussian((48, 160), generator(2))
    parts = []

    def backward(dy):
        row, *_ = reference.quantize(dy, FORMATS["tensorwise"][0], None)
        parts.append((small_part_of(dy, row).shape, small_part_of(dy, None).shape))
        return row.data

    torch._dynamo.reset()
    torch.compile(backward, backend="eager", fullgraph=True)(dy)
    assert parts == [((1, 1), (1, 1))]
    assert small_part_of(dy, None) is dy


def traced(function, *args) -> tuple[tuple[torch.Tensor, ...], list[torch.fx.Node]]:
    """Results of compiled code, and the nodes of aten's operators that it is made of."""
    nodes: list[torch.fx.Node] = []

    def keep(graph, inputs):
        nodes.extend(graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    return torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*args), nodes


def copies_of_codes(nodes: list[torch.fx.Node]) -> list[str]:
    """Operators that copy float8 codes, but for ours."""
    made = [str(node.target) for node in nodes if getattr(node.meta.get("val"), "dtype", None) == E4M3]
    copies = ("aten.clone", "aten.t_copy", "aten.copy", "aten.permute_copy", "aten.transpose_copy")
    return [target for target in made if target.startswith(copies)]


def same_operands(found: tuple[torch.Tensor, ...], expected: list[Operand]) -> bool:
    right = [tensor for operand in expected for tensor in operand.tensors]
    return all(
        torch.equal(bits(a), bits(b)) and a.stride() == b.stride() for a, b in zip(found, right, strict=True)
    )


@pytest.mark.parametrize("any_layout", [False, True])
@pytest.mark.parametrize("is_part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_codes_are_transposed_by_a_node(name, is_part, any_layout):
    """Inductor would store them twice in one kernel, which is slow, and by some versions of ptxas wrong.

    Of a part of a matrix, whose amaxes are reduced over ranks, and for GEMMs that take any layout, too.
    """
    source = scales.CURRENT.over(lambda amax, tile: amax * 2) if is_part else scales.CURRENT
    formats = FORMATS[name]

    def both(x):
        made = quantize(x, *formats, source, any_layout)
        return made.rowwise.tensors + made.columnwise.tensors

    x = gaussian((48, 160), generator(3))
    found, nodes = traced(both, x)
    assert same_operands(found, list(reference.quantize(x, *formats, reduce=source.reduce)[:2]))
    assert copies_of_codes(nodes) == []
    assert any(str(node.target).startswith("f8sub.") for node in nodes)


def test_codes_that_are_encoded_anew_in_compiled_code_are_transposed_by_a_node():
    rowwise, columnwise = FORMATS["rowwise"]
    operand, dy = made((rowwise, columnwise), (48, 160)), gaussian((4, 48), generator(2))

    def backward(data, scale_inv, dy):
        given = Operand(data, scale_inv, rowwise)
        return derive_columnwise_in_backward(given, columnwise, dy, True).tensors

    found, nodes = traced(backward, operand.data, operand.scale_inv, dy)
    assert same_operands(found, [reference.derive_columnwise(operand, columnwise)])
    assert copies_of_codes(nodes) == []
    assert any(str(node.target).startswith("f8sub.transpose") for node in nodes)


@on_each_format
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
def test_amaxes_in_a_graph_leave_out_what_is_not_finite(formats, dtype):
    """Also where a tile, a row or the whole matrix has nothing else; eager code finds them by other operators."""
    tile = formats[0].tile
    found = torch.compile(lambda x: scales.amax(x, tile), backend="aot_eager")
    x = gaussian((48, 160), generator(9)).to(dtype)
    x[3], x[5, 7], x[6, 40], x[40:, 128:] = torch.nan, torch.inf, -torch.inf, -torch.inf
    x[7] = -0.0
    for matrix in (x, torch.full_like(x, torch.nan), x[3:4], x[:0]):
        assert torch.equal(found(matrix), scales.finite_amax(matrix, tile))
        assert found(matrix).dtype == torch.float32


def a_difference(a: torch.Tensor, b: torch.Tensor, format: Float8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of what is left of ``b`` in a sum, which Inductor has before and after it rounds the sum, and the sum."""
    total = a + b
    return quantize(total - a, format, None, any_layout=True).rowwise.data, total


def a_product(a: torch.Tensor, b: torch.Tensor, format: Float8Format) -> tuple[torch.Tensor]:
    return (quantize(a * b, format, None, any_layout=True).rowwise.data,)


@pytest.mark.parametrize("what", ["difference", "subnormal product"])
def test_casts_of_numbers_that_the_amax_was_not_taken_of_stay_finite(what):
    """Compiled code computes x in two kernels, and rounds it to its dtype in one of them alone."""
    format = Float8Format(torch.float8_e5m2, Tile(ALL, ALL))
    if what == "difference":
        a, b = gaussian((64, 1), generator(1)) * 1000, gaussian((64, 64), generator(2)) * 0.3
        function, given = a_difference, (a.bfloat16(), b.bfloat16())
    else:
        # Up to 1.4 times the smallest float16, to which it is rounded.
        b = torch.linspace(0.0, 1.4, 64 * 64).view(64, 64)
        function, given = a_product, ((torch.ones(64, 1) * 2**-12).half(), (b * 2**-12).half())
    torch._dynamo.reset()
    codes, *_ = torch.compile(function, fullgraph=True)(*given, format)
    assert codes.float().isfinite().all()
    assert codes.float().abs().max() == format.max


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
def test_a_cast_has_no_difference_that_a_gpu_fuses_with_the_product_before_it(dtype):
    """``p * q - p * q`` is the product's rounding error there, which a small scale makes larger than the codes."""
    x, scale = gaussian((4, 4), generator(1)), torch.ones(1, 1)
    found = make_fx(functools.partial(reference.cast, dtype=dtype))(x, scale)
    assert {node.target for node in found.graph.nodes} & {torch.ops.aten.sub.Tensor} == set()
