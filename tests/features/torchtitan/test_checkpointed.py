"""f8sub's policy, by torchtitan's option."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import f8sub
from f8sub.features.torchtitan_hooks.checkpointed import KEEP, set_policy
from tests.counting import Float8Work
from tests.data_sets import gaussian, generator


def model_of(block: nn.Module, keep: str) -> nn.Module:
    model = nn.Sequential(block)
    setattr(model, KEEP, keep)
    model.register_forward_pre_hook(set_policy)
    return model


def test_a_checkpointed_block_multiplies_nothing_again():
    torch.manual_seed(0)
    block = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model, products = model_of(checkpoint_wrapper(block), "gemms"), []
    for each in (model, nn.Sequential(checkpoint_wrapper(block))):
        y = each(torch.randn(8, 64))
        with Float8Work() as work:
            y.backward(gaussian((8, 64), generator(1)))
        products.append(work.plain_matmuls)
    assert not model._forward_pre_hooks
    assert products[0] == 3 + 2  # every dw, and a dx of all layers but the first
    assert products[1] >= products[0] + 2  # the recomputation may stop before the last one


def test_a_model_without_checkpointed_blocks_is_refused():
    with pytest.raises(f8sub.Float8ConfigError, match="checkpoint_policy='gemms' is for blocks"):
        model_of(nn.Linear(64, 64), "gemms")(torch.randn(8, 64))
