"""However a model is sharded, each rank gets the bytes of the unsharded model, at one byte an element on the wire."""

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import f8sub
from f8sub.checkpoint import save
from f8sub.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel
from tests.models import Stack, seed_weights
from tests.selection import long_but
from tests.tensor_parallel.models import MLP, mesh_of
from tests.wire import Wire

BF16 = torch.bfloat16
PLAN = {"up": Float8ColwiseParallel(), "down": Float8RowwiseParallel()}
POLICY = MixedPrecisionPolicy(param_dtype=BF16)


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


WAYS = [("fsdp", 2), ("fsdp", 3), ("fsdp", 5), ("hsdp", 4), ("columns", 2), ("tp", 2), ("fsdp-tp", 4)]
EXPORTED = [("tensorwise", *WAYS[1]), ("mxfp8", *WAYS[-1]), *(("blockwise", *way) for way in WAYS)]
EXPORTED += [(recipe, *way) for recipe in ("mxfp8", "rowwise", "delayed") for way in (WAYS[2], *WAYS[4:6])]
LOADED = [*(("blockwise", *way) for way in (WAYS[1], *WAYS[2:])), ("rowwise", *WAYS[0]), ("mxfp8", *WAYS[-1])]


@pytest.mark.parametrize(("recipe", "way", "world"), long_but(EXPORTED[:2], EXPORTED))
def test_bytes_are_those_of_the_unsharded_model(rank, world, recipe, way):
    model = sharded(model_of(recipe), way, world)
    f8sub.precompute_scales(model)
    expected = unsharded(recipe)
    first, _ = f8sub.float8_state_dict(model, "compressed-tensors", dtype=BF16)
    again = dict(f8sub.float8_weights(model, "compressed-tensors", dtype=BF16))
    assert differences(first, expected) == []
    assert differences(again, expected) == []


@pytest.mark.parametrize(("recipe", "way", "world"), long_but(LOADED[:1], LOADED))
def test_each_rank_loads_its_own_shards(rank, world, tmp_path, recipe, way):
    folder = str(tmp_path)
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
    assert differences(found, f8sub.float8_state_dict(whole, "compressed-tensors", dtype=BF16)[0]) == []
    assert sum(wire.calls.values()) == 0


@pytest.mark.parametrize("whole", [True, False], ids=["all in the root", "blocks apart"])
def test_a_load_after_a_forward_without_backward_lasts(rank, world, tmp_path, whole):
    """That leaves the root's parameters gathered, and backward puts the sharded ones in their place."""
    folder = tmp_path / "out"
    if rank == 0:
        write_unsharded("blockwise", folder)
    dist.barrier()
    model = f8sub.convert_to_float8(seed_weights(Named(), seed=3), recipe="blockwise")
    for block in () if whole else model.layers:
        fully_shard(block)
    fully_shard(model)
    f8sub.precompute_scales(model)

    def forward() -> torch.Tensor:
        h = torch.ones(128, 64)
        for block in model.layers:
            h = block(h)
        return model.lm_head(model.norm(h))

    model.forward = forward
    with torch.no_grad():
        model()
    f8sub.load_float8(model, folder)
    f8sub.precompute_scales(model)
    y = model()
    y.backward(torch.randn(y.shape))
    expected = f8sub.convert_to_float8(seed_weights(Named(), seed=4), recipe="blockwise")
    f8sub.load_float8(expected, folder)
    found = {name: value.full_tensor() for name, value in model.state_dict().items()}
    assert differences(found, dict(expected.state_dict())) == []


@pytest.mark.parametrize(
    ("recipe", "scales"), [("tensorwise", 0), ("rowwise", 0), ("mxfp8", 16 * (128 + 256))]
)
def test_one_byte_an_element_is_gathered(rank, world, recipe, scales):
    """Bytes that an export gathers."""
    model = f8sub.convert_to_float8(seed_weights(Stack(256, 128, 256)), recipe=recipe)
    for layer in model.layers:
        fully_shard(layer, mp_policy=POLICY)
    fully_shard(model, mp_policy=POLICY)
    f8sub.precompute_scales(model)
    with Wire() as wire:
        list(f8sub.float8_weights(model, "compressed-tensors"))
    assert wire.gathered == 2 * 256 * 128 + scales


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


def root_is_plain(model: nn.Module, mesh: Any) -> nn.Module:
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    return model


def root_is_compiled(model: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(
        torch.compile(root_is_plain(model, mesh), backend="eager"), mesh=mesh, mp_policy=POLICY
    )


def compiled_root(model: nn.Module, mesh: Any) -> nn.Module:
    return torch.compile(
        fully_shard(root_is_plain(model, mesh), mesh=mesh, mp_policy=POLICY), backend="eager"
    )


def compiled_blocks(model: nn.Module, mesh: Any) -> nn.Module:
    for i, block in enumerate(model.layers):
        model.layers[i] = torch.compile(fully_shard(block, mesh=mesh, mp_policy=POLICY), backend="eager")
    return fully_shard(model, mesh=mesh, mp_policy=POLICY)


def ddp(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


WRAPPED = {
    each.__name__: each for each in (root_is_plain, root_is_compiled, compiled_root, compiled_blocks, ddp)
}


@pytest.mark.parametrize("way", WRAPPED)
def test_wrappers_and_roots_of_any_kind(rank, world, tmp_path, way):
    folder = str(tmp_path)
    model = WRAPPED[way](model_of("tensorwise"), mesh_of(world, 1)["dp"])
    f8sub.precompute_scales(model)
    expected = unsharded("tensorwise")
    target = Path(folder) / "out"
    f8sub.save_float8(model, target, layout="compressed-tensors", dtype=BF16)
    other = f8sub.convert_to_float8(seed_weights(Named(), seed=3), recipe="tensorwise")
    other = WRAPPED[way](other, mesh_of(world, 1)["dp"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # float scales, which are cast again
        f8sub.load_float8(other, target)
    f8sub.precompute_scales(other)
    again, _ = f8sub.float8_state_dict(other, "compressed-tensors", dtype=BF16)
    plain = {name: value for name, value in expected.items() if value.dtype == BF16}
    config = json.loads((target / "config.json").read_text())
    found = load_file(target / "model.safetensors")
    assert differences(found, expected) == []
    assert differences({k: again[k] for k in plain}, plain) == []
    assert config["architectures"][0] == "Named"


def on_some_ranks(rank: int, world: int, folder: str) -> list[str]:
    """The last ranks have a model, the first has none of it and calls nothing."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return []
    model = sharded_over(model_of("blockwise"), group)
    f8sub.precompute_scales(model)
    f8sub.save_float8(model, Path(folder) / "out", layout="compressed-tensors", dtype=BF16, group=group)
    return differences(load_file(Path(folder) / "out" / "model.safetensors"), unsharded("blockwise"))


def sharded_over(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    return fully_shard(model, mesh=mesh, mp_policy=POLICY)


def test_a_model_of_some_of_the_ranks(ranks, tmp_path):
    assert ranks(3, on_some_ranks, str(tmp_path)) == [[]] * 3


def bad_config(rank: int, world: int, folder: str) -> str:
    model = sharded(model_of("blockwise"), "fsdp", world)
    f8sub.precompute_scales(model)
    try:
        f8sub.save_float8(
            model, Path(folder) / "out", layout="compressed-tensors", dtype=BF16, config={1: 0, "a": 0}
        )
    except TypeError as error:
        f8sub.precompute_scales(model)  # the ranks are together still
        return type(error).__name__
    return ""


def test_a_config_that_json_cannot_hold_is_an_error_of_every_rank(ranks, tmp_path):
    assert ranks(2, bad_config, str(tmp_path)) == ["TypeError"] * 2
    assert not list(tmp_path.iterdir())
