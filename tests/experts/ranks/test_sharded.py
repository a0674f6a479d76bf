"""PEFT's adapters over experts under FSDP2: the losses and gradients of the unsharded model, codes alone too."""

import warnings

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import f8sub

pytest.importorskip("peft")

from tests.experts.adapter_models import adapted, loss_and_gradients


@pytest.mark.parametrize(("kind", "primary"), [("qwen3_moe", True), ("gpt_oss", False)])
def test_adapters_over_sharded_experts(rank, world, kind, primary):
    # torch checks what a parametrization makes of a weight, so PEFT's sum of a gathered one is made once a forward.
    warnings.filterwarnings("ignore", "aten.baddbmm", f8sub.Float8Warning)
    plain, model = (adapted(kind, primary_weights=primary) for _ in range(2))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if primary:
        f8sub.drop_high_precision(model)
    wrong = []
    for step in range(2):
        f8sub.precompute_scales(model)
        (loss, gradients), (other, others) = map(loss_and_gradients, (plain, model))
        wrong += [f"loss {step}"] * (not torch.equal(loss, other))
        wrong += [
            f"{name} {step}"
            for name, gradient in gradients.items()
            if not torch.equal(gradient, others[name].full_tensor())
        ]
    assert wrong == []
