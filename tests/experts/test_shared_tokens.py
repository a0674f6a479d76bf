"""Tokens that gate and up share are cast once, with the bits that each would make alone."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import f8sub
from f8sub.kernels.grouped import operands
from tests.data_sets import gaussian, generator
from tests.experts.models import OwnExperts

COUNTS = [5, 0, 20]
GATE_UP_DOWN, BACKWARD = 3, 3
"""Casts of tokens without sharing: one a product forward, one dy a product backward."""


class Apart(OwnExperts):
    """Gives up a copy of the tokens, which nothing knows."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        h = nn.functional.silu(f8sub.grouped_linear(x, self.gate, ends))
        return f8sub.grouped_linear(h * f8sub.grouped_linear(x.clone(), self.up, ends), self.down, ends)


class Changed(OwnExperts):
    """Changes something between gate and up."""

    change: Callable[[torch.Tensor, torch.Tensor], None]

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        h = nn.functional.silu(f8sub.grouped_linear(x, self.gate, ends))
        with torch.no_grad():
            self.change(x, ends)
        return f8sub.grouped_linear(h * f8sub.grouped_linear(x, self.up, ends), self.down, ends)


class Checkpointed(OwnExperts):
    """Recomputes up in backward, alone."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        h = nn.functional.silu(f8sub.grouped_linear(x, self.gate, ends))
        up = checkpoint(lambda x: f8sub.grouped_linear(x, self.up, ends, "rowwise"), x, use_reentrant=False)
        return f8sub.grouped_linear(h * up, self.down, ends)


def ran(
    kind: type[OwnExperts], recipe: str, dtype: torch.dtype = torch.int64
) -> tuple[list[torch.Tensor], int]:
    """y and all gradients of a step, and how often tokens were cast."""
    f8sub.register_experts(kind)
    model = f8sub.convert_to_float8(kind(len(COUNTS), 32, 48), recipe, experts=True, skip_defaults=False)
    x = gaussian((sum(COUNTS) + 2, 32), generator(0)).requires_grad_()
    ends = torch.tensor(COUNTS).cumsum(0).to(dtype)
    with mock.patch.object(operands, "quantize_both", wraps=operands.quantize_both) as cast:
        y = model(x, ends)
        y.backward(gaussian(tuple(y.shape), generator(1)))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())], cast.call_count


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_one_cast_serves_gate_and_up(recipe, dtype):
    shared, casts = ran(OwnExperts, recipe, dtype)
    apart, casts_apart = ran(Apart, recipe, dtype)
    assert casts_apart == GATE_UP_DOWN + BACKWARD
    assert casts == casts_apart - 1
    for a, b in zip(shared, apart, strict=True):
        assert torch.equal(a, b)


def test_what_is_saved_of_shared_tokens_is_saved_once():
    found = {}
    for kind in (OwnExperts, Apart):
        saved = set()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, s=saved: (s.add(t.data_ptr()), t)[1], lambda t: t
        ):
            ran(kind, "rowwise")
        found[kind] = len(saved)
    assert found[OwnExperts] < found[Apart]


def _other_tokens(x: torch.Tensor, ends: torch.Tensor) -> None:
    x.mul_(-3.0)


def _other_ends(x: torch.Tensor, ends: torch.Tensor) -> None:
    ends[1] += 4


def _other_memory(x: torch.Tensor, ends: torch.Tensor) -> None:
    x.data = x.data * 2


@pytest.mark.parametrize("change", [_other_tokens, _other_ends, _other_memory])
def test_what_changed_in_between_is_cast_anew(change):
    f8sub.register_experts(Changed)
    model = f8sub.convert_to_float8(
        Changed(len(COUNTS), 32, 48), "rowwise", experts=True, skip_defaults=False
    )
    model.change = change
    x, ends = gaussian((sum(COUNTS) + 2, 32), generator(0)), torch.tensor(COUNTS).cumsum(0)
    with mock.patch.object(operands, "quantize_both", wraps=operands.quantize_both) as cast, torch.no_grad():
        model(x, ends)
    assert cast.call_count == GATE_UP_DOWN


def test_a_checkpointed_product_shares_nothing():
    f8sub.register_experts(Checkpointed)
    _, casts = ran(Checkpointed, "rowwise")
    assert casts == GATE_UP_DOWN + 1 + BACKWARD
