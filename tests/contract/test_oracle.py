"""The oracle against torch's own float8 types and matmul: two independent answers to the same question."""

import numpy as np
import pytest
import torch

from tests import oracle
from tests.budgets import excess, product_budget
from tests.data_sets import make

FORMATS = ["e4m3", "e5m2"]
on_each_format = pytest.mark.parametrize("format", FORMATS, ids=FORMATS)


@on_each_format
def test_all_256_values(format):
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(oracle.TORCH_DTYPES[format]).to(torch.float64).numpy()
    np.testing.assert_array_equal(oracle.VALUES[format], expected)
    assert torch.finfo(oracle.TORCH_DTYPES[format]).max == oracle.MAX[format]


def test_the_values_of_e2m1():
    """OCP Microscaling Formats (MX) v1.0, table 4."""
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert oracle.VALUES["e2m1"].tolist() == [*half, *(-value for value in half)]
    assert oracle.MAX["e2m1"] == 6.0


def test_one_wrong_code_is_over_the_budget():
    spec = oracle.RECIPES["rowwise"]["x"]
    a = oracle.quantize(oracle.to_numpy(make("gaussian", (16, 256), seed=1)), spec)
    b = oracle.quantize(oracle.to_numpy(make("gaussian", (16, 256), seed=2)), spec)
    product = oracle.Product(a.values, b.values)
    wrong = a.codes.copy()
    wrong[4, 9] += 1
    shifted = oracle.VALUES["e4m3"][wrong] * a.scale_inv
    assert excess(torch.from_numpy(shifted @ b.values.T).float(), product) > 10
    assert excess(torch.from_numpy(product.value).float(), product) <= 1
    assert excess(torch.full((16, 16), float("nan")), product) == float("inf")
    assert (product_budget(product, torch.bfloat16) >= product_budget(product, torch.float32)).all()
