"""f8sub's policy, by torchtitan's option."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import f8sub
from f8sub.features.torchtitan_hooks.checkpointed import KEEP, set_policy
from tests.data_sets import gaussian, generator


def model_of(block: nn.Module, keep: str) -> nn.Module:
    model = nn.Sequential(block)
    setattr(model, KEEP, keep)
    model.register_forward_pre_hook(set_policy)
    return model


def test_a_checkpointed_block_multiplies_nothing_again():
    torch.manual_seed(0)
    block = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model = model_of(checkpoint_wrapper(block), "gemms")
    products = Counter[str]()

    class Counts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            products[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    y = model(torch.randn(8, 64))
    assert not model._forward_pre_hooks
    dy = gaussian((8, 64), generator(1))
    with Counts():
        y.backward(dy)
    assert products["mm"] > products["addmm"] == 0
    plain = nn.Sequential(checkpoint_wrapper(block))(torch.randn(8, 64))
    with Counts():
        plain.backward(dy)
    assert products["addmm"] >= 2


def test_a_model_without_checkpointed_blocks_is_refused():
    with pytest.raises(f8sub.Float8ConfigError, match="checkpoint_policy='gemms' is for blocks"):
        model_of(nn.Linear(64, 64), "gemms")(torch.randn(8, 64))
