"""However a model is sharded, each rank gets the bytes of the unsharded model, at one byte an element on the wire."""

import json
import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import f8sub
from f8sub.features.export import save
from f8sub.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel
from tests.features.tensor_parallel.models import MLP, mesh_of
from tests.models import Stack, seed_weights
from tests.selection import long_but
from tests.wire import Wire

BF16 = torch.bfloat16
PLAN = {"up": Float8ColwiseParallel(), "down": Float8RowwiseParallel()}
POLICY = MixedPrecisionPolicy(param_dtype=BF16)
RECIPES = ("blockwise", "tensorwise", "rowwise", "mxfp8", "delayed")


class Named(nn.Module):
    """Blocks of two layers, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(2))
        self.norm = nn.LayerNorm(64)
        self.lm_head = nn.Linear(64, 11)


def model_of(recipe: str) -> nn.Module:
    return f8sub.convert_to_float8(seed_weights(Named()), recipe=recipe)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    names = [name for name in found.keys() | expected.keys() if name not in found or name not in expected]
    same = found.keys() & expected.keys()
    return names + [
        name
        for name in same
        if not torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8))
    ]


def unsharded(recipe: str) -> dict[str, torch.Tensor]:
    model = model_of(recipe)
    f8sub.precompute_scales(model)
    return f8sub.float8_state_dict(model, "compressed-tensors", dtype=BF16)[0]


def write_unsharded(recipe: str, folder: Path) -> None:
    """What ``save_float8`` writes, by one rank of several."""
    state, config = f8sub.float8_state_dict(model_of(recipe), "compressed-tensors", dtype=BF16)
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))


def sharded(model: nn.Module, way: str, world: int) -> nn.Module:
    if way in ("tp", "fsdp-tp"):
        mesh = mesh_of(1, 2) if way == "tp" else mesh_of(2, 2)
        for block in model.layers:
            parallelize_module(block, mesh["tp"], PLAN)
        if way == "tp":
            return model
        mesh = mesh["dp"]
    else:
        mesh = mesh_of(2, world // 2, 1)["replicas", "dp"] if way == "hsdp" else mesh_of(world, 1)["dp"]
    options = {"shard_placement_fn": lambda p: Shard(p.dim() - 1)} if way == "columns" else {}
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=POLICY, **options)
    return fully_shard(model, mesh=mesh, mp_policy=POLICY)


def exported(rank: int, world: int, recipe: str, way: str) -> tuple[list[str], list[str]]:
    """What differs from the unsharded model, twice."""
    model = sharded(model_of(recipe), way, world)
    f8sub.precompute_scales(model)
    expected = unsharded(recipe)
    first, _ = f8sub.float8_state_dict(model, "compressed-tensors", dtype=BF16)
    again = dict(f8sub.float8_weights(model, "compressed-tensors", dtype=BF16))
    return differences(first, expected), differences(again, expected)


WAYS = [("fsdp", 2), ("fsdp", 3), ("fsdp", 5), ("hsdp", 4), ("columns", 2), ("tp", 2), ("fsdp-tp", 4)]


@pytest.mark.parametrize("recipe", long_but(("tensorwise", "mxfp8"), RECIPES))
@pytest.mark.parametrize(("way", "world"), long_but(WAYS[1:2] + WAYS[-1:], WAYS))
def test_bytes_are_those_of_the_unsharded_model(ranks, recipe, way, world):
    assert ranks(world, exported, recipe, way) == [([], [])] * world


def loaded(rank: int, world: int, recipe: str, way: str, folder: str) -> tuple[list[str], int]:
    """What differs after a checkpoint was loaded into a sharded model of other weights, and the collectives of it."""
    if rank == 0:
        write_unsharded(recipe, Path(folder) / "out")
    dist.barrier()
    model = f8sub.convert_to_float8(seed_weights(Named(), seed=3), recipe=recipe)
    model = sharded(model, way, world)
    with Wire() as wire:
        f8sub.load_float8(model, Path(folder) / "out")
    f8sub.precompute_scales(model)
    found, _ = f8sub.float8_state_dict(model, "compressed-tensors", dtype=BF16)
    whole = f8sub.convert_to_float8(seed_weights(Named(), seed=4), recipe=recipe)
    f8sub.load_float8(whole, Path(folder) / "out")
    f8sub.precompute_scales(whole)
    return differences(found, f8sub.float8_state_dict(whole, "compressed-tensors", dtype=BF16)[0]), sum(
        wire.calls.values()
    )


@pytest.mark.parametrize("recipe", long_but(("blockwise",), ("blockwise", "rowwise", "mxfp8")))
@pytest.mark.parametrize(("way", "world"), long_but(WAYS[1:2], WAYS))
def test_each_rank_loads_its_own_shards(ranks, tmp_path, recipe, way, world):
    assert ranks(world, loaded, recipe, way, str(tmp_path)) == [([], 0)] * world


def sent(rank: int, world: int, recipe: str) -> int:
    """Bytes that an export gathers."""
    model = f8sub.convert_to_float8(seed_weights(Stack(256, 128, 256)), recipe=recipe)
    for layer in model.layers:
        fully_shard(layer, mp_policy=POLICY)
    fully_shard(model, mp_policy=POLICY)
    f8sub.precompute_scales(model)
    with Wire() as wire:
        list(f8sub.float8_weights(model, "compressed-tensors"))
    return wire.gathered


@pytest.mark.parametrize(
    ("recipe", "scales"), [("tensorwise", 0), ("rowwise", 0), ("mxfp8", 16 * (128 + 256))]
)
def test_one_byte_an_element_is_gathered(ranks, recipe, scales):
    assert ranks(2, sent, recipe) == [2 * 256 * 128 + scales] * 2


def saved(rank: int, world: int, folder: str, breaks: bool) -> tuple[str, list[str]]:
    model = sharded(model_of("blockwise"), "fsdp", world)
    f8sub.precompute_scales(model)
    target = Path(folder) / "out"
    full = OSError("No space left on device") if breaks else None
    error = ""
    with mock.patch.object(save, "_write_files", side_effect=full) if breaks else mock.MagicMock():
        try:
            f8sub.save_float8(model, target, layout="compressed-tensors", dtype=BF16)
        except OSError as raised:
            error = str(raised)
    f8sub.precompute_scales(model)  # the ranks are together still
    return error, sorted(os.listdir(folder))


@pytest.mark.parametrize("breaks", [False, True])
def test_rank_0_writes_and_every_rank_learns_how_it_went(ranks, breaks):
    with tempfile.TemporaryDirectory() as folder:
        found = ranks(2, saved, folder, breaks)
    assert found == [("No space left on device", [])] * 2 if breaks else [("", ["out"])] * 2
