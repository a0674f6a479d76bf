"""An FSDP2 that is not as f8sub knows it is refused before anything is gathered; high precision trains on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import f8sub
from f8sub import torch_compat
from tests.models import BF16, loss_of, shard, transformer

UNKNOWN = (
    r"is not known to f8sub for FSDP2's all-gather of weights in float8: .*%s.* with torch 2\.11 to 2\.15: .*"
    r"float8_all_gather=False$"
)
OPERATOR = "torch.ops.fsdp.all_gather_copy_in.default"


@contextmanager
def nothing_seen() -> Iterator[pytest.MonkeyPatch]:
    """As if this were the first look."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_compat, "_found", {})
        patch.setattr(torch_compat, "_known", set())
        yield patch


def refused(words: str, model: torch.nn.Module) -> None:
    with pytest.raises(f8sub.Float8ConfigError, match=UNKNOWN % words):
        f8sub.precompute_scales(model)
    with pytest.raises(f8sub.Float8ConfigError, match=UNKNOWN % words):
        loss_of(model, 0, 0)


def an_operator_that_takes_more(patch: pytest.MonkeyPatch) -> str:
    given = torch_compat.GATHER.names[OPERATOR]
    patch.setitem(torch_compat.GATHER.names, OPERATOR, given.rpartition(" ")[0])
    return r"all_gather_copy_in\.default takes \(.*, rank\), and f8sub knows it with"


def an_operator_that_is_gone(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(torch_compat, "_at", without(OPERATOR))
    return r"all_gather_copy_in\.default is missing"


def states_that_are_elsewhere(patch: pytest.MonkeyPatch) -> str:
    path = "torch.distributed._composable_state._module_state_mapping"
    patch.setattr(torch_compat, "_at", without(path))
    return "_module_state_mapping is missing"


def a_parameter_without_a_policy(patch: pytest.MonkeyPatch) -> str:
    patch.setitem(torch_compat.GATHER.attributes, "FSDPParam", "_module_info mp_policy_of sharded_param")
    return r"FSDPParam\.mp_policy_of is missing"


def a_group_of_another_name(patch: pytest.MonkeyPatch) -> str:
    patch.delitem(torch_compat.GATHER.attributes, "FSDPParamGroup")
    return r"_fsdp_param_group\.FSDPParamGroup in the place of a class that it knows"


def without(path: str) -> Any:
    at = torch_compat._at

    def found(other: str) -> Any:
        if other == path:
            raise AttributeError(other)
        return at(other)

    return found


CHANGES = {
    change.__name__: change
    for change in (
        an_operator_that_takes_more,
        an_operator_that_is_gone,
        states_that_are_elsewhere,
        a_parameter_without_a_policy,
        a_group_of_another_name,
    )
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_known_is_refused(rank, world, change):
    with nothing_seen() as patch:
        words = CHANGES[change](patch)
        refused(words, shard(transformer("tensorwise"), BF16))


def test_it_trains_gathered_in_high_precision(rank, world):
    """As the error says, with the losses that it has anyway."""
    right = loss_of(shard(transformer("tensorwise", all_gather=False), BF16), 0, rank)
    with nothing_seen() as patch:
        an_operator_that_takes_more(patch)
        model = shard(transformer("tensorwise", all_gather=False), BF16)
        f8sub.precompute_scales(model)
        loss = loss_of(model, 0, rank)
        assert torch.equal(loss, right)
        loss.backward()


class Lazily:
    """A policy that FSDP2 would ask for a parameter's dtype later."""

    param_dtype, reduce_dtype = torch.bfloat16, torch.float32
    output_dtype, cast_forward_inputs = None, True
    param_dtype_override_fn = staticmethod(lambda parameter: torch.float32)


def test_a_policy_that_is_not_resolved_is_refused(rank, world):
    model = shard(transformer("tensorwise"), BF16)
    for _, param in torch_compat.fsdp_params():
        param.mp_policy = Lazily()
    refused("the policy of .* is not resolved", model)


def test_a_dtype_that_follows_afterwards_is_refused(rank, world):
    """FSDP2 has codes of values rounded to bfloat16, and would take them for float32's."""
    model = shard(transformer("tensorwise"), BF16)
    f8sub.precompute_scales(model)
    for group, param in torch_compat.fsdp_params():
        group.mp_policy = param.mp_policy = MixedPrecisionPolicy()  # torch before 2.15 reads the group's
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"gathers its weight as torch\.float32, .* torch\.bfloat16"
    ):
        loss_of(model, 0, rank)


def test_another_operator_of_fsdps_is_refused(rank, world):
    """Which would be given the bytes, and copies, of what has no memory yet."""
    model = fully_shard(transformer("tensorwise"))
    f8sub.precompute_scales(model)
    shards = [s for e in model.blocks[0].q._f8sub.conversion.exchanges.values() for s in e.table.shards]
    pending = shards[0].pending(shards[0].master)
    with torch.library._scoped_library("fsdp", "FRAGMENT") as library:
        library.define("copy_in_of_another_version(Tensor input) -> ()")
        with pytest.raises(f8sub.Float8ConfigError, match=r"fsdp::copy_in_of_another_version is called"):
            torch.ops.fsdp.copy_in_of_another_version(pending)
