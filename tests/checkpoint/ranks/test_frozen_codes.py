"""However a model is sharded, frozen layers send a file's own codes, one byte an element, with the file's scales."""

import gc
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef

import f8sub
from f8sub.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel
from tests.checkpoint.files import file_of
from tests.models import seed_weights
from tests.selection import long_but
from tests.tensor_parallel.models import mesh_of
from tests.wire import Wire

LAYERS = ["layers.0", "layers.1"]
WIDTH, HIDDEN = 256, 512
PLAN = {"0": Float8ColwiseParallel(), "1": Float8RowwiseParallel()}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        up, down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.layers, self.norm = nn.Sequential(up, down), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(x))


def frozen(device: str = "cpu", recipe: str = "blockwise") -> nn.Module:
    with torch.device(device):
        model = Net()
    model = f8sub.convert_to_float8(
        model if device == "meta" else seed_weights(model), recipe, primary_weights=True
    )
    model.layers.requires_grad_(False)
    return model


def sharded(model: nn.Module, way: str, world: int) -> nn.Module:
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    mesh = mesh_of(world, 1)["dp"]
    if way == "fsdp-tp":
        mesh = mesh_of(2, 2)
        parallelize_module(model.layers, mesh["tp"], PLAN)
        mesh = mesh["dp"]
    elif way == "hsdp":
        mesh = mesh_of(2, world // 2, 1)["replicas", "dp"]
    elif way == "columns":
        options["shard_placement_fn"] = lambda p: Shard(p.dim() - 1)
    fully_shard(model.layers, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def written(rank: int, folder: str, power_of_2: bool) -> tuple[Path, dict, dict]:
    """The same file in each rank's folder."""
    target = Path(folder) / str(rank)
    return target, *file_of(target, Net(), LAYERS, power_of_2=power_of_2)


def held(rank: int, world: int, way: str, power_of_2: bool, folder: str, device: str) -> list[str]:
    """What is wrong after a file was loaded into a sharded model."""
    target, tensors, values = written(rank, folder, power_of_2)
    model, wrong = sharded(frozen(device), way, world), []
    if device != "meta":
        f8sub.precompute_scales(model)  # shards are made before, too
    masters = [StorageWeakRef(layer.weight.to_local().untyped_storage()) for layer in model.layers]
    with Wire() as wire:
        f8sub.load_float8(model, target)
    wrong += ["collectives"] * any(wire.calls.values())
    f8sub.precompute_scales(model)
    gc.collect()
    wrong += ["a master is held"] * (device != "meta" and not all(master.expired() for master in masters))
    for layer in LAYERS:
        whole = model.get_submodule(layer).weight.full_tensor().detach()
        wrong += [f"values of {layer}"] * (not torch.equal(whole, values[layer].float()))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()
    model.unshard()
    wrong += ["norm"] * (not torch.equal(model.norm.weight.detach(), tensors["norm.weight"].bfloat16()))
    model.reshard()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # engines cast float32 scales of blocks anew
        state, _ = f8sub.float8_state_dict(model, "compressed-tensors", dtype=torch.bfloat16)
    for layer in LAYERS:
        codes, scales = state[f"{layer}.weight"], state[f"{layer}.weight_scale"]
        wrong += ["codes"] * (not torch.equal(codes.float(), tensors[f"{layer}.weight"].float()))
        wrong += ["scales"] * (not torch.equal(scales, tensors[f"{layer}.weight_scale_inv"]))
    return wrong


WAYS = [("fsdp", 3), ("fsdp", 2), ("fsdp", 5), ("hsdp", 4), ("columns", 2), ("fsdp-tp", 4)]
FILES = [(*WAYS[0], True), *((*way, False) for way in WAYS[::-1])]
LAYOUTS = [("mxfp8", *WAYS[0]), *(("rowwise", *way) for way in WAYS), ("mxfp8", *WAYS[-1])]


@pytest.mark.parametrize(("way", "world", "power_of_2"), long_but(FILES[:2], FILES))
def test_codes_and_scales_are_the_files(ranks, tmp_path, way, world, power_of_2):
    assert ranks(world, held, way, power_of_2, str(tmp_path), "cpu") == [[]] * world


def test_shards_on_meta_get_no_values_in_high_precision(ranks, tmp_path):
    assert ranks(2, held, "fsdp", False, str(tmp_path), "meta") == [[]] * 2


def test_one_byte_an_element_is_sent(rank, world, tmp_path):
    """Bytes that each forward gathers of frozen layers, and whether y is the unsharded model's."""
    folder = str(tmp_path)
    target, _, _ = written(rank, folder, False)
    model, alone = sharded(frozen(), "fsdp", world), frozen()
    for each in (model, alone):
        f8sub.load_float8(each, target)
        f8sub.precompute_scales(each)
    same, gathered = [], []
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        with Wire() as wire:
            found = model.layers(x)
        model.layers.reshard()
        gathered.append(wire.gathered)
        expected = alone.layers(x.bfloat16())
        same.append(torch.equal(found.float(), expected.float()))
    assert gathered == [2 * WIDTH * HIDDEN] * 3
    assert same == [True] * 3


def too_late(rank: int, world: int, folder: str) -> str:
    target, _, _ = written(rank, folder, False)
    model = sharded(frozen(), "fsdp", world)
    model(torch.randn(4, WIDTH))
    model.reshard()
    before = model.norm.weight.to_local().clone()
    try:
        f8sub.load_float8(model, target)
    except f8sub.Float8ConfigError as error:
        dist.barrier()
        assert torch.equal(model.norm.weight.to_local(), before)
        return str(error)
    return ""


def test_after_a_forward_it_is_an_error_and_writes_nothing(ranks, tmp_path):
    for error in ranks(2, too_late, str(tmp_path)):
        assert "layers.0: its weight was gathered before" in error


@pytest.mark.parametrize(("recipe", "way", "world"), long_but(LAYOUTS[:1], LAYOUTS))
def test_every_layout_comes_back(rank, world, tmp_path, recipe, way):
    folder = str(tmp_path)
    source = f8sub.convert_to_float8(seed_weights(Net()), recipe=recipe)
    state, config = f8sub.float8_state_dict(source, "compressed-tensors", dtype=torch.bfloat16)
    target = Path(folder) / str(rank)
    target.mkdir()
    save_file(state, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps({"quantization_config": config}))
    model = sharded(frozen(recipe=recipe), way, world)
    f8sub.load_float8(model, target)
    f8sub.precompute_scales(model)
    model(torch.randn(4, WIDTH)).square().mean().backward()
    again, _ = f8sub.float8_state_dict(model, "compressed-tensors", dtype=torch.bfloat16)
    assert [torch.equal(again[name].float(), tensor.float()) for name, tensor in state.items()] == [True] * 6
