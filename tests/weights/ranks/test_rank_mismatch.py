"""Ranks that were converted differently: a typed error on every rank, before anything can hang."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import f8sub
from f8sub.weights import conversion
from tests.data_sets import gaussian, generator
from tests.models import Stack, seed_weights, shard

# These ranks pretend to be different: what one test changes in the library, others must not find.
pytestmark = pytest.mark.own_ranks


E4M3_DY = f8sub.get_recipe("gridquant", dy=torch.float8_e4m3fn)

OPTIONS = {
    "recipe": ({"recipe": "tensorwise"}, {"recipe": "rowwise"}, "recipe rowwise, fprop rowwise e4m3"),
    "format": ({"recipe": "gridquant"}, {"recipe": E4M3_DY}, "dgrad 256x256 e4m3 by"),
    "all-gather": ({}, {"float8_all_gather": False}, "float8_all_gather False"),
    "backend": ({}, {"backend": "reference"}, "backends reference"),
    "primary": ({}, {"primary_weights": True}, "primary_weights True"),
    "skip": ({}, {"skip": ("layers.1",)}, "layer none further"),
    "filter": ({}, {"filter_fn": lambda module, fqn: "0" not in fqn}, "layer layers.1"),
}


def converted(rank: int, world: int, option: str, precompute: bool) -> tuple[str, str]:
    """The error's name and text; the last rank is the odd one."""
    usual, odd, _ = OPTIONS[option]
    model = shard(
        f8sub.convert_to_float8(seed_weights(Stack(64, 96, 64)), **(odd if rank == world - 1 else usual))
    )
    try:
        if precompute:
            f8sub.precompute_scales(model)
        model(gaussian((16, 64), generator(1)))
    except f8sub.Float8RankMismatchError as error:
        return type(error).__name__, str(error)
    return "no error", ""


@pytest.mark.parametrize("precompute", [True, False], ids=["at-precompute", "at-first-forward"])
@pytest.mark.parametrize("option", OPTIONS, ids=list(OPTIONS))
def test_a_rank_converted_differently(ranks, option, precompute):
    results = ranks(3, converted, option, precompute)
    for name, text in results:
        assert name == "Float8RankMismatchError"
        assert "ranks 0, 1: " in text
        assert (
            f"rank 2: {OPTIONS[option][2]}" in text
            or f", {OPTIONS[option][2]}" in text.partition("rank 2: ")[2]
        )
        assert "layers." in text
    assert len({text for _, text in results}) == 1


def another_version(rank: int, world: int) -> str:
    if rank == 1:
        conversion.__version__ = "0.0.9"
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(64, 96, 64))))
    with pytest.raises(f8sub.Float8RankMismatchError) as error:
        f8sub.precompute_scales(model)
    return str(error.value)


def test_a_rank_with_another_version(ranks):
    for text in ranks(3, another_version):
        assert f"layers.0: ranks 0, 2: f8sub {f8sub.__version__}; rank 1: f8sub 0.0.9." in text


def other_replica(rank: int, world: int, replicas: int) -> str:
    """The last replica is converted another way, all of it."""
    shards = world // replicas
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    recipe = "rowwise" if rank >= world - shards else "tensorwise"
    model = f8sub.convert_to_float8(seed_weights(Stack(64, 96, 64)), recipe=recipe)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(f8sub.Float8RankMismatchError) as error:
        model(gaussian((16, 64), generator(1)))
    return str(error.value)


@pytest.mark.parametrize("replicas", [2, 4], ids=["2-replicas-of-2-shards", "4-replicas-of-1-shard"])
def test_a_replica_that_differs_is_not_averaged_with_the_others(ranks, replicas):
    odd = {2: "ranks 2, 3: ", 4: "rank 3: "}[replicas]
    for text in ranks(4, other_replica, replicas):
        assert f"{odd}recipe rowwise" in text


def alike(rank: int, world: int) -> bool:
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(64, 96, 64))))
    return model(gaussian((16, 64), generator(1))).isfinite().all().item()


def test_ranks_converted_alike_pass(ranks):
    assert ranks(3, alike) == [True] * 3


def dtypes(rank: int, world: int) -> str:
    dtype = torch.bfloat16 if rank == 0 else torch.float32
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(64, 96)).to(dtype)))
    try:
        f8sub.precompute_scales(model)
    except f8sub.Float8RankMismatchError as error:
        return type(error).__name__
    return "no error"


def test_a_rank_with_another_dtype(ranks):
    for name in ranks(2, dtypes):
        assert name == "Float8RankMismatchError"


def policies(rank: int, world: int) -> str:
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if rank == world - 1 else {}
    model = f8sub.convert_to_float8(seed_weights(Stack(64, 96, 64)))
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    try:
        model(gaussian((16, 64), generator(1)))
    except f8sub.Float8RankMismatchError as error:
        return str(error)
    return "no error"


def test_ranks_that_shard_with_another_policy(ranks):
    for text in ranks(3, policies):
        assert "layers.0: ranks 0, 1: param_dtype None; rank 2: param_dtype torch.bfloat16. Call" in text
