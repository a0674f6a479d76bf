"""Experts that FSDP2 or expert parallelism shards are exported to the bytes of the unsharded model, on every rank."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import f8sub
from tests.experts.models import OwnExperts, of_transformers
from tests.selection import long_but
from tests.wire import Wire

BF16 = torch.bfloat16
WIDTH, HIDDEN = 128, 256


class Model(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts, self.head = OwnExperts(experts, WIDTH, HIDDEN), nn.Linear(WIDTH, 128, bias=False)
        nn.init.constant_(self.head.weight, 0.25)


def converted(experts: int, recipe: str, **options: object) -> Model:
    f8sub.register_experts(OwnExperts)
    return f8sub.convert_to_float8(Model(experts), recipe, experts=True, skip_defaults=False, **options)


def sharded(model: Model, way: str, world: int) -> Model:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16)}
    if way in ("ep", "ep-fsdp"):
        degree = world if way == "ep" else 2
        mesh = init_device_mesh("cpu", (world // degree, degree), mesh_dim_names=("dp", "ep"))
        for name, weight in list(model.experts.named_parameters()):
            part = distribute_tensor(weight, mesh["ep"], [Shard(0)])
            setattr(model.experts, name, nn.Parameter(part))
        if way == "ep":
            return model
        mesh = mesh["dp"]
    if way == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "dp"))
    if way == "rows":
        options["shard_placement_fn"] = lambda p: Shard(1) if p.dim() == 3 else None
    fully_shard(model.experts, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    as_bytes = lambda tensor: tensor.contiguous().view(torch.uint8)  # noqa: E731
    wrong = sorted(found.keys() ^ expected.keys())
    same = (name for name in expected if name in found)
    return wrong + [name for name in same if not torch.equal(as_bytes(found[name]), as_bytes(expected[name]))]


def exported(rank: int, world: int, recipe: str, way: str, experts: int, folder: str) -> list[str]:
    """What differs from the unsharded model's export: in the stream, and in the files."""
    expected, config = f8sub.float8_state_dict(converted(experts, recipe), dtype=BF16)
    model = sharded(converted(experts, recipe, float8_all_gather=way != "ep"), way, world)
    f8sub.precompute_scales(model)
    found, of_sharded = f8sub.float8_state_dict(model, dtype=BF16)
    f8sub.save_float8(model, Path(folder) / "out", dtype=BF16)
    files = load_file(Path(folder) / "out" / "model.safetensors")
    wrong = differences(found, expected) + differences(files, expected)
    return wrong + ["config"] * (of_sharded != config)


WAYS = [
    ("ep-fsdp", 4, 4),
    ("fsdp", 3, 5),
    ("fsdp", 2, 4),
    ("fsdp", 3, 2),
    ("hsdp", 4, 3),
    ("ep", 2, 4),
    ("ep", 3, 4),
]
EXPORTED = [("tensorwise", *WAYS[1]), *(("blockwise", *way) for way in WAYS)]
EXPORTED += [("rowwise", *WAYS[0]), ("mxfp8", *WAYS[-1])]


@pytest.mark.parametrize(("recipe", "way", "world", "experts"), long_but(EXPORTED[:2], EXPORTED))
def test_bytes_are_those_of_the_unsharded_model(ranks, tmp_path, recipe, way, world, experts):
    assert ranks(world, exported, recipe, way, experts, str(tmp_path)) == [[]] * world


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_experts_that_are_sharded_by_their_rows(ranks, tmp_path, recipe):
    assert ranks(2, exported, recipe, "rows", 3, str(tmp_path)) == [[]] * 2


@pytest.mark.parametrize(("way", "world", "experts"), long_but((WAYS[0], WAYS[1]), WAYS))
def test_each_rank_reads_its_own_experts(rank, world, tmp_path, way, experts):
    folder = str(tmp_path)
    source = converted(experts, "blockwise")
    f8sub.save_float8(source, Path(folder) / "out", dtype=BF16)
    dist.barrier()
    other = converted(experts, "blockwise", float8_all_gather=way != "ep")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(3)
    model = sharded(other, way, world)
    with Wire() as wire:
        f8sub.load_float8(model, Path(folder) / "out")
    wrong = ["collectives"] * any(wire.calls.values())
    whole = converted(experts, "blockwise")
    f8sub.load_float8(whole, Path(folder) / "out")
    for (name, found), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        found = found.full_tensor() if isinstance(found, DTensor) else found
        wrong += [name] * (not torch.equal(found.detach().clone(), expected.detach().clone()))
    assert wrong == []


@pytest.mark.parametrize("dtype", [None, BF16])
@pytest.mark.parametrize("stays_unsharded", [True, False])
def test_experts_that_checkpoints_keep_in_one_tensor_have_their_values(rank, world, dtype, stays_unsharded):
    """Not those of the codes that FSDP2 gathers for training, and that a forward may have left there."""
    plain = of_transformers("gpt_oss")
    model = f8sub.convert_to_float8(copy.deepcopy(plain), "rowwise", experts=True)
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=not stays_unsharded)
    fully_shard(model, mp_policy=policy)
    f8sub.precompute_scales(model)
    with torch.no_grad():
        model(torch.arange(16)[None])
    state, _ = f8sub.float8_state_dict(model, dtype=dtype)
    for leaf in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{leaf}"
        assert torch.equal(state[name], plain.get_parameter(name).detach().to(BF16)), name


def test_one_byte_an_element_is_gathered(rank, world):
    model = sharded(converted(4, "blockwise"), "fsdp", world)
    f8sub.precompute_scales(model)
    with Wire() as wire:
        list(f8sub.float8_weights(model))
    assert wire.gathered == 3 * 4 * WIDTH * HIDDEN + WIDTH * 128
