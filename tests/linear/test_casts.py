"""Compiled, a checkpointed forward casts x for fprop alone, and with the compiler's own kernels."""

import pytest
import torch

from tests.linear.test_compile import row_major  # noqa: F401
from tests.linear.test_policies import POLICIES, compiled
from tests.selection import long_but

OPERANDS, WEIGHTS = 4, 7
"""Different x in the block, and its weights. q, k and v share one, as gate and up do; there is a dy for each weight."""


@pytest.fixture(autouse=True)
def _row_major(row_major):  # noqa: F811
    compiled.cache_clear()
    yield
    compiled.cache_clear()


CASES = [("rowwise", "every-second-mm"), ("tensorwise", "no-policy"), ("blockwise", "every-second-mm")]


@pytest.mark.parametrize(("recipe", "policy"), long_but(CASES[:1], CASES))
def test_forward_makes_no_codes_for_wgrad(recipe, policy):
    contexts, _ = POLICIES[policy]
    found, without = compiled(recipe, contexts), compiled(recipe, None)
    of_weights = WEIGHTS if recipe == "blockwise" else 0  # the compiler makes no scales of blocks
    assert without.forward["quantize"] == OPERANDS + of_weights
    assert found.forward["quantize"] == (OPERANDS + of_weights if recipe == "blockwise" else 0)
    assert without.backward["quantize"] == WEIGHTS
    assert found.backward["quantize"] >= WEIGHTS + OPERANDS
    assert all(torch.equal(a, b) for a, b in zip(found.tensors, without.tensors, strict=True))
