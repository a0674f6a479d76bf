"""FSDP1 trains a converted model as an unsharded one, and a warning says that it gathers no float8; its bytes count."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import Stack, refusal, seed_weights

sys.path.insert(0, str(Path(__file__).parents[3] / "recipes"))
from f8sub_pretrain.traffic import count_traffic

SIZES = 64, 96, 64
TOLD = r"^layers\.0 and 1 more: in float8, and sharded by FSDP1 .*fully_shard, which gathers float8$"


def stack() -> torch.nn.Module:
    return f8sub.convert_to_float8(seed_weights(Stack(*SIZES)))


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    return model(gaussian((16, SIZES[0]), generator(1))).square().mean()


def trained(model: torch.nn.Module) -> float:
    loss = loss_of(model)
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("wraps", ["the model", "its layers"])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_is_told_once_and_its_bytes_are_counted(rank, world, wraps, use_orig_params):
    expected, inner = loss_of(stack()).item(), stack()
    policy = ModuleWrapPolicy({f8sub.Float8Linear}) if wraps == "its layers" else None
    model = FullyShardedDataParallel(
        inner, use_orig_params=use_orig_params, auto_wrap_policy=policy, device_id=torch.device("cpu")
    )
    with pytest.warns(f8sub.Float8Warning, match=TOLD), count_traffic() as traffic:
        loss = trained(model)
    assert loss == pytest.approx(expected, rel=1e-6)
    whole = sum(parameter.nbytes for parameter in stack().parameters())
    assert traffic.all_gather_bytes in (whole, 2 * whole)  # again in backward, where it was freed
    assert traffic.reduced_bytes == whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(model).backward()


@pytest.mark.parametrize("ignores", [False, True])
def test_fsdp2_is_not_told(rank, world, ignores):
    model = stack()
    fully_shard(model, ignored_params={model.layers[1].weight} if ignores else None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", f8sub.Float8Warning)
        loss_of(model).backward()
    assert not any(
        model._forward_pre_hooks[key].__class__.__name__ == "partial" for key in model._forward_pre_hooks
    )


def test_a_model_that_fsdp1_wrapped_already_is_refused(rank, world):
    model = FullyShardedDataParallel(seed_weights(Stack(*SIZES)), device_id=torch.device("cpu"))
    told = refusal(f8sub.Float8ConfigError, f8sub.convert_to_float8, model)
    assert told.startswith(
        "the model is already sharded (FullyShardedDataParallel): call convert_to_float8 before"
    )
