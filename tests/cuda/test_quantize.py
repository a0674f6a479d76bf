"""Codes and scales made on a GPU, eagerly and compiled by Inductor, are the CPU's bit for bit."""

import pytest
import torch

import f8sub
from f8sub.formats import Operand
from f8sub.kernels.gemm.block_scales import unflat
from f8sub.kernels.quantize import quantize
from tests.data_sets import edge_values, make, on_each_dtype
from tests.kernels.products import assert_same_bits
from tests.layers import on_each_recipe

SHAPES = [(48, 160), (272, 400), (2, 512), (128, 130)]
on_each_operand = pytest.mark.parametrize("operand", ["x", "w", "dy"], ids=["x", "w", "dy"])


@on_each_dtype
@on_each_operand
@on_each_recipe
def test_both_usages(recipe, operand, dtype):
    matrices = [make("lognormal", shape, 3, dtype) for shape in SHAPES]
    matrices[0][3, 4], matrices[0][7, 9], matrices[0][20, 0] = float("nan"), float("inf"), float("-inf")
    for matrix in (*matrices, *edge_values(dtype).values()):
        expected = f8sub.quantize(matrix, recipe, operand=operand)
        found = f8sub.quantize(matrix.cuda(), recipe, operand=operand)
        assert_same_bits(found.rowwise, expected.rowwise)
        assert_same_bits(found.columnwise, expected.columnwise)


def both_usages(x: torch.Tensor, formats: tuple) -> list[torch.Tensor]:
    return [t for operand in quantize(x, *formats) if operand is not None for t in operand.tensors]


@on_each_dtype
@on_each_operand
@on_each_recipe
def test_compiled(recipe, operand, dtype):
    formats = f8sub.get_recipe(recipe).formats(operand)
    torch._dynamo.reset()
    compiled = torch.compile(both_usages, fullgraph=True)
    for data in ("gaussian", "lognormal"):
        matrix = make(data, (144, 304), 5, dtype)
        found = compiled(matrix.cuda(), formats)
        for expected in filter(None, quantize(matrix, *formats)):
            count = len(expected.tensors)
            assert_same_bits(unflat(Operand.of(expected.format, *found[:count])), expected)
            found = found[count:]
