"""Codes and scales made on a GPU, eagerly and compiled by Inductor, are the CPU's bit for bit."""

import pytest
import torch

import f8sub
from f8sub.formats import Operand
from f8sub.kernels.gemm.block_scales import unflat
from f8sub.kernels.quantize import quantize
from tests.cuda.products import RECIPES, assert_same_bits
from tests.data_sets import DATA_SETS, edge_values, make

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = [(48, 160), (272, 400), (2, 512), (128, 130)]
on_each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)
on_each_operand = pytest.mark.parametrize("operand", ["x", "w", "dy"], ids=["x", "w", "dy"])
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))


def assert_as_on_the_cpu(matrix: torch.Tensor, recipe: str, operand: str) -> None:
    expected = f8sub.quantize(matrix, recipe, operand=operand)
    found = f8sub.quantize(matrix.cuda(), recipe, operand=operand)
    assert_same_bits(found.rowwise, expected.rowwise)
    assert_same_bits(found.columnwise, expected.columnwise)


@on_each_dtype
@pytest.mark.parametrize("data", DATA_SETS, ids=list(DATA_SETS))
@on_each_operand
@on_each_recipe
def test_both_usages(recipe, operand, data, dtype):
    for shape in SHAPES:
        matrix = make(data, shape, 3, dtype)
        assert_as_on_the_cpu(matrix.where(matrix.isfinite(), 1e4), recipe, operand)


@on_each_dtype
@on_each_recipe
def test_edge_values(recipe, dtype):
    for matrix in edge_values(dtype).values():
        assert_as_on_the_cpu(matrix, recipe, "w")


@on_each_recipe
def test_non_finite_elements(recipe):
    matrix = make("gaussian", (32, 48), 2)
    matrix[3, 4], matrix[7, 9], matrix[20, 0] = float("nan"), float("inf"), float("-inf")
    assert_as_on_the_cpu(matrix, recipe, "x")


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
