"""Selective checkpointing of experts: what a list saves of bf16's products, it saves of float8's."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import f8sub
from f8sub.kernels.gemm.select import GROUPED
from f8sub.kernels.grouped import ops
from tests.experts.test_checkpoints import (
    ENDS,
    Experts,
    K,
    converted,
    results,
)
from tests.models import equal


def list_of_bf16() -> Any:
    """A list that was made for bf16."""
    saved = {torch.ops.aten._grouped_mm.default}
    return create_selective_checkpoint_contexts(
        lambda ctx, func, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE if func in saved else CheckpointPolicy.PREFER_RECOMPUTE
        )
    )


POLICIES = {
    "gemms": f8sub.checkpoint_policy("gemms"),
    "bf16": f8sub.checkpoint_policy(),
    "list": list_of_bf16,
}
on_each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "rowwise_with_gw_hp"])
@on_each_policy
def test_what_a_policy_saves_is_not_multiplied_again(monkeypatch, policy, recipe):
    """Backward multiplies for dx alone: it reads the first product, whose result is saved, and not the second."""
    counted: list[int] = []
    for name, backend in GROUPED.items():
        counting = lambda *args, rows=backend.rows: (counted.append(1), rows(*args))[1]  # noqa: E731
        monkeypatch.setitem(GROUPED, name, backend._replace(rows=counting))

    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(model, x, use_reentrant=False, context_fn=policy)
        counted.clear()
        return y

    found = results(converted(Experts, None, recipe), run=run)
    assert len(counted) == 2
    assert equal(found, results(converted(Experts, None, recipe)))


def test_without_a_policy_both_are_multiplied_again(monkeypatch):
    """But for the last, which backward does not read."""
    counted: list[int] = []
    multiply = ops.rows
    monkeypatch.setattr(ops, "rows", lambda *args: (counted.append(1), multiply(*args))[1])
    model = converted(Experts)
    y = checkpoint(model, torch.randn(int(ENDS[-1]), K, requires_grad=True), use_reentrant=False)
    counted.clear()
    y.backward(torch.randn_like(y))
    assert len(counted) == 2 + 2


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("keep", ["gemms", "bf16"])
def test_compiled_code(keep):
    model, policy = converted(Experts), f8sub.checkpoint_policy(keep)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x, use_reentrant=False, context_fn=policy)

    assert equal(results(model, run=lambda model, x: run(x)), results(converted(Experts)))
