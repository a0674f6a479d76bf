"""Frozen experts under FSDP2 send a file's own codes, with the file's scales, however many ranks have experts."""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import f8sub
from f8sub.weights.primary_weight import PrimaryWeight
from tests.checkpoint.test_frozen_experts import TOKENS, frozen, written
from tests.experts.models import experts_of
from tests.selection import long_but
from tests.wire import Wire


def sharded(model: torch.nn.Module, along_rows: bool = False) -> torch.nn.Module:
    place = (lambda p: Shard(1) if p.dim() == 3 else None) if along_rows else None
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "shard_placement_fn": place}
    fully_shard(experts_of(model)[0], **options)
    return fully_shard(model, **options)


def held(rank: int, world: int, folder: str) -> list[str]:
    """What is wrong after a file was loaded into a sharded model."""
    target = Path(folder)
    tensors = load_file(target / "model.safetensors")
    alone, model = frozen(), sharded(frozen())
    f8sub.load_float8(alone, target)
    with Wire() as wire:
        f8sub.load_float8(model, target)
    wrong = ["collectives"] * any(wire.calls.values())
    (module,) = experts_of(model)
    wrong += ["not held"] * (not all(isinstance(p._local_tensor, PrimaryWeight) for p in module.parameters()))
    f8sub.precompute_scales(model)
    with torch.no_grad():
        wrong += ["y"] * (not torch.equal(model(TOKENS).logits, alone(TOKENS).logits))
    model.reshard()
    module.reshard()
    with Wire() as wire:
        module.unshard()
    padded = -(-3 // world) * world  # experts: FSDP2 gathers shards of one size
    expected = padded * sum(p.numel() // 3 for p in module.parameters())
    wrong += [f"{wire.gathered} bytes, not {expected}"] * (wire.gathered != expected)
    module.reshard()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # engines cast float32 scales of blocks anew
        state, _ = f8sub.float8_state_dict(model, "compressed-tensors", dtype=torch.bfloat16)
    for name in (name for name in tensors if ".experts." in name and name.endswith("weight")):
        wrong += ["codes"] * (not torch.equal(state[name].float(), tensors[name].float()))
        wrong += ["scales"] * (not torch.equal(state[f"{name}_scale"], tensors[f"{name}_scale_inv"]))
    return wrong


@pytest.mark.parametrize(
    ("world", "power_of_2"), long_but([(2, False), (4, False)], [(2, False), (4, False), (2, True)])
)
def test_codes_and_scales_are_the_files(ranks, tmp_path, world, power_of_2):
    written(tmp_path, power_of_2)
    assert ranks(world, held, str(tmp_path)) == [[]] * world


def along_rows(rank: int, world: int, folder: str) -> bool:
    model = sharded(frozen("rowwise"), along_rows=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a second cast: rows are no blocks
        f8sub.load_float8(model, folder)
    return any(isinstance(p._local_tensor, PrimaryWeight) for p in experts_of(model)[0].parameters())


def test_experts_that_are_cut_along_their_rows_get_the_values(ranks, tmp_path):
    written(tmp_path, power_of_2=True)
    assert ranks(2, along_rows, str(tmp_path)) == [False] * 2
