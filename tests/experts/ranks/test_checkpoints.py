"""Experts that checkpoint inside their own forward, and contexts around experts, under FSDP2."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import f8sub
from tests.data_sets import gaussian, generator
from tests.experts.test_checkpoints import (
    AROUND,
    ENDS,
    Copies,
    Experts,
    Handed,
    K,
)
from tests.models import BF16, equal, refusal

CASES = [
    (Experts, "rowwise", True),
    (Handed, "tensorwise", True),
    (Copies, "rowwise", False),
    (Handed, "blockwise", False),
]


def results(
    around: object, kind: type[nn.Module], recipe: str, gathered: bool, policy=None, context=None
) -> list[torch.Tensor]:
    """Two steps' results; FSDP2 frees the gathered weights between forward and backward."""
    model = nn.Sequential(kind(around), kind(around))
    f8sub.convert_to_float8(model, recipe, experts=True, float8_all_gather=gathered)
    for layer in model:
        fully_shard(layer, mp_policy=policy or MixedPrecisionPolicy())
    fully_shard(model, mp_policy=policy or MixedPrecisionPolicy())
    f8sub.precompute_scales(model)
    found = []
    for step in range(2):
        x = gaussian((int(ENDS[-1]), K), generator(step)).requires_grad_()
        with context or f8sub.autocast():
            y = model(x)
        y.backward(gaussian(tuple(y.shape), generator(9)).to(y.dtype))
        found += [y.detach(), x.grad, *(p.grad.full_tensor() for p in model.parameters())]
    return found


@pytest.mark.parametrize(("kind", "recipe", "gathered"), CASES)
def test_what_is_repeated_is_what_ran(rank, world, kind, recipe, gathered):
    policies = [None] if kind is Copies else [None, BF16]
    for policy in policies:
        expected = results(None, kind, recipe, gathered, policy)
        for around in AROUND.values():
            assert equal(results(around, kind, recipe, gathered, policy), expected)


def test_the_context_of_the_forward(rank, world):
    inside = f8sub.autocast("rowwise_with_gw_hp")
    expected = results(None, Experts, "rowwise_with_gw_hp", True)
    for name in ("non_reentrant", "selective"):
        assert equal(results(AROUND[name], Experts, "rowwise", True, context=inside), expected)
    other = f8sub.autocast("rowwise")
    alone = results(None, Experts, "rowwise", False)
    assert equal(results(None, Experts, "tensorwise", False, context=other), alone)


def test_a_recipe_that_cannot_read_what_was_gathered_is_refused(rank, world):
    with_context = None, Experts, "tensorwise", True, None, f8sub.autocast("rowwise")
    message = refusal(f8sub.Float8ConfigError, results, *with_context)
    assert message.startswith("0: recipe 'rowwise")
    assert "gathered or kept of it is tensorwise e4m3" in message


def test_disabled_with_a_float8_wire_is_the_dequantized_weight(rank, world):
    found = results(None, Experts, "rowwise", True, context=f8sub.autocast(enabled=False))
    model = nn.Sequential(Experts(), Experts())
    with torch.no_grad():
        for each in (each for weight in model.parameters() for each in weight):
            each.copy_(f8sub.quantize(each, "rowwise", "w", columnwise=False).dequantize())
    x = gaussian((int(ENDS[-1]), K), generator(0)).requires_grad_()
    y = model(x)
    y.backward(gaussian(tuple(y.shape), generator(9)))
    high = [y, x.grad, *(p.grad for p in model.parameters())]
    for a, b in zip(found[: len(high)], high, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
