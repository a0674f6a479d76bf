"""Amaxes and scales of many weights by one launch each, on a GPU: those of torch's operators, bitwise."""

import pytest

from tests.cuda.test_quantize_cuda import runs  # noqa: F401
from tests.kernels import test_shard_amaxes as interpreted
from tests.kernels.interpreted import needs_triton
from tests.weights.ranks.test_amax_table import differences

pytestmark = needs_triton


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_amaxes_of_all_tiles_and_dtypes(seed, runs):  # noqa: F811
    interpreted.test_amaxes_of_all_tiles_and_dtypes(seed, "cuda")
    assert runs == ["amaxes_of_many"] * 4


def test_amaxes_of_edge_values(runs):  # noqa: F811
    interpreted.test_amaxes_of_edge_values("cuda")
    assert set(runs) == {"amaxes_of_many"}


def test_scales_of_many_amaxes(runs):  # noqa: F811
    interpreted.test_scales_of_many_amaxes("cuda")
    assert set(runs) == {"scales_of_many"}


def differences_on_gpu(rank: int, world: int, recipe: str) -> tuple[list[str], list[str], int]:
    return differences(recipe, False, "cuda")


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "gridquant"])
def test_tables_are_those_of_torchs_operators(ranks, recipe):
    ((wrong, launched, planned),) = ranks(1, differences_on_gpu, recipe, gpus=True, timeout=120)
    assert wrong == []
    of_tables = [name for name in launched if name.endswith("_of_many")]
    # Scales of the weights of bfloat16, and of those of float32.
    assert of_tables == ["amaxes_of_many", *["scales_of_many"] * 2] * 4
    assert planned == 2
