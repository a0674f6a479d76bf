"""Ranks that were converted differently: a typed error on every rank, before anything can hang."""

import time

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import f8sub
from tests.data_sets import gaussian, generator
from tests.dist.models import Stack, seed_weights, shard

SECONDS = 10

OPTIONS = {
    "recipe": ({"recipe": "tensorwise"}, {"recipe": "rowwise"}),
    "all-gather": ({}, {"float8_all_gather": False}),
    "backend": ({}, {"backend": "reference"}),
    "skip": ({}, {"skip": ("layers.1",)}),
    "filter": ({}, {"filter_fn": lambda module, fqn: "0" not in fqn}),
}


def converted(rank: int, world: int, option: str, precompute: bool) -> tuple[str, str, float]:
    """The error's name and text, and the seconds until it was raised; the last rank is the odd one."""
    usual, odd = OPTIONS[option]
    model = shard(
        f8sub.convert_to_float8(seed_weights(Stack(64, 96, 64)), **(odd if rank == world - 1 else usual))
    )
    start = time.monotonic()
    try:
        if precompute:
            f8sub.precompute_scales(model)
        model(gaussian((16, 64), generator(1)))
    except f8sub.Float8RankMismatchError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "no error", "", time.monotonic() - start


@pytest.mark.parametrize("precompute", [True, False], ids=["at-precompute", "at-first-forward"])
@pytest.mark.parametrize("option", OPTIONS, ids=list(OPTIONS))
def test_a_rank_converted_differently(ranks, option, precompute):
    results = ranks(3, converted, option, precompute)
    for name, text, seconds in results:
        assert name == "Float8RankMismatchError"
        assert "rank" in text
        assert "layers." in text
        assert seconds < SECONDS
    assert len({text for _, text, _ in results}) == 1


def alike(rank: int, world: int) -> bool:
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(64, 96, 64))))
    return model(gaussian((16, 64), generator(1))).isfinite().all().item()


def test_ranks_converted_alike_pass(ranks):
    assert ranks(3, alike) == [True] * 3


def dtypes(rank: int, world: int) -> tuple[str, float]:
    dtype = torch.bfloat16 if rank == 0 else torch.float32
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(64, 96)).to(dtype)))
    start = time.monotonic()
    try:
        f8sub.precompute_scales(model)
    except f8sub.Float8RankMismatchError as error:
        return type(error).__name__, time.monotonic() - start
    return "no error", time.monotonic() - start


def test_a_rank_with_another_dtype(ranks):
    for name, seconds in ranks(2, dtypes):
        assert name == "Float8RankMismatchError"
        assert seconds < SECONDS


def policies(rank: int, world: int) -> tuple[str, float]:
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if rank == world - 1 else {}
    model = f8sub.convert_to_float8(seed_weights(Stack(64, 96, 64)))
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    start = time.monotonic()
    try:
        model(gaussian((16, 64), generator(1)))
    except f8sub.Float8RankMismatchError as error:
        return str(error), time.monotonic() - start
    return "no error", time.monotonic() - start


def test_ranks_that_shard_with_another_policy(ranks):
    found = ranks(3, policies)
    for (text, seconds), dtype in zip(found, ("float32", "float32", "bfloat16"), strict=True):
        assert text.startswith("layers.0: ")
        assert dtype in text
        assert seconds < SECONDS
