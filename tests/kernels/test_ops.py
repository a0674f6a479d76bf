"""f8sub::derive_columnwise as torch.compile sees it: schema, fake and result."""

import pytest
import torch

from f8sub import ALL, Float8Format, ScaleRule, Tile
from f8sub.kernels import ops, reference
from tests.data_sets import gaussian, generator

OP = torch.ops.f8sub.derive_columnwise.default
E4M3 = torch.float8_e4m3fn
FORMATS = {
    "tensorwise": (Float8Format(E4M3, Tile(ALL, ALL)),) * 2,
    "rowwise": (Float8Format(E4M3, Tile(1, ALL), ScaleRule.POWER_OF_2),) * 2,
    "128x128": (Float8Format(E4M3, Tile(128, 128)),) * 2,
    "1x32": (Float8Format(E4M3, Tile(1, 32), ScaleRule.POWER_OF_2),) * 2,
    "1x128-by-128x1": (Float8Format(E4M3, Tile(1, 128)), Float8Format(E4M3, Tile(128, 1))),
}
SHAPES = [(48, 160), (16, 16), (1, 32), (32, 1)]
on_each_format = pytest.mark.parametrize("formats", FORMATS.values(), ids=list(FORMATS))
on_each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


def arguments(formats, shape):
    row, col = formats
    operand = reference.quantize(gaussian(shape, generator(1)), row, None)[0]
    tiles = [row.tile.rows, row.tile.cols], [col.tile.rows, col.tile.cols]
    dy = gaussian((4, shape[0]), generator(2))
    return operand, (operand.data, operand.scale_inv, dy, E4M3, *tiles, col.scale_rule.value)


@on_each_shape
@on_each_format
def test_opcheck(formats, shape):
    operand, args = arguments(formats, shape)
    del operand
    # test_schema compares inputs before and after by isclose, which no float8 tensor has: see the next test.
    checks = ("test_faketensor", "test_autograd_registration")
    assert set(torch.library.opcheck(OP, args, test_utils=checks).values()) == {"SUCCESS"}


@on_each_format
def test_it_changes_no_argument(formats):
    _, args = arguments(formats, (48, 160))
    before = [arg.clone() for arg in args[:3]]
    OP(*args)
    for arg, copy in zip(args[:3], before, strict=True):
        assert torch.equal(arg.view(torch.uint8), copy.view(torch.uint8))
        assert arg._version == 0


@on_each_format
def test_opcheck_under_dynamic_shapes(formats):
    _, args = arguments(formats, (48, 160))
    assert torch.library.opcheck(OP, args, test_utils=("test_aot_dispatch_dynamic",)) == {
        "test_aot_dispatch_dynamic": "SUCCESS"
    }


@on_each_shape
@on_each_format
def test_it_is_the_references_derivation(formats, shape):
    operand, args = arguments(formats, shape)
    data, scale_inv = OP(*args)
    expected = reference.derive_columnwise(operand, formats[1])
    assert torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scale_inv, expected.scale_inv)
    eager = ops.derive_columnwise_in_backward(operand, formats[1], args[2])
    assert torch.equal(eager.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert eager.format == formats[1]


@on_each_format
def test_its_result_is_memory_of_its_own(formats):
    operand, args = arguments(formats, (48, 160))
    data, scale_inv = OP(*args)
    given = {operand.data.untyped_storage().data_ptr(), operand.scale_inv.untyped_storage().data_ptr()}
    assert not given & {data.untyped_storage().data_ptr(), scale_inv.untyped_storage().data_ptr()}


def test_dy_keeps_it_in_the_backward_graph():
    """Traced, the operator takes dy: a partitioner cannot compute it in the forward graph."""
    operand, args = arguments(FORMATS["rowwise"], (48, 160))
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    def backward(dy):
        derived = ops.derive_columnwise_in_backward(operand, FORMATS["rowwise"][1], dy)
        return derived.data, derived.scale_inv

    torch._dynamo.reset()
    data, _ = torch.compile(backward, backend=keep, fullgraph=True)(args[2])
    expected = reference.derive_columnwise(operand, FORMATS["rowwise"][1])
    assert torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8))
    (graph,) = graphs
    (node,) = [n for n in graph.graph.nodes if "derive_columnwise" in str(n.target)]
    dy = next(
        n for n in graph.graph.nodes if n.op == "placeholder" and n.meta["example_value"].shape == (4, 48)
    )
    assert dy in node.args
