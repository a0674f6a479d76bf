"""What torch before 2.14 lacks that torchtitan 0.3 takes from it is put in its place: import this before torchtitan."""

import functools
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.attention import flex_attention

FULL_BLOCKS = "separate_full_blocks"


def with_full_blocks_apart(create: Callable[..., Any]) -> Callable[..., Any]:
    """``create_block_mask`` that always keeps full blocks apart, with the argument that asks for it."""

    @functools.wraps(create)
    def create_block_mask(*args: Any, separate_full_blocks: bool = True, **kwargs: Any) -> Any:
        if not separate_full_blocks:
            raise NotImplementedError(
                f"create_block_mask of torch {torch.__version__} keeps full blocks apart"
            )
        return create(*args, **kwargs)

    return create_block_mask


def with_groups_apart(shard: Callable[..., Any]) -> Callable[..., Any]:
    """``fully_shard`` that shards each module of a list by itself, unless they share a parameter.

    torchtitan shards the last norm and ``lm_head`` in one group, and its loss in chunks runs the head after the model.
    FSDP2 of torch 2.11 takes such a group as not run yet, and backward finds the norm's weight freed.
    """

    @functools.wraps(shard)
    def fully_shard(module: Any, **how: Any) -> Any:
        if not isinstance(module, list):
            return shard(module, **how)
        parameters = [parameter for each in module for parameter in each.parameters()]
        if len(set(parameters)) < len(parameters):
            return shard(module, **how)
        return [shard(each, **how) for each in module]

    return fully_shard


if not hasattr(
    torch.distributed.fsdp, "DataParallelMeshDims"
):  # a type of spmd_types, which partial_dtensor is not

    class DataParallelMeshDims:
        """A name to import."""

    torch.distributed.fsdp.DataParallelMeshDims = DataParallelMeshDims
if not hasattr(FSDPState, "_force_complete_incomplete_states"):
    torch.distributed.fsdp.fully_shard = with_groups_apart(torch.distributed.fsdp.fully_shard)
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = lambda timeout, group=None: _set_pg_timeout(timeout, group)
if FULL_BLOCKS not in signature(flex_attention.create_block_mask).parameters:
    flex_attention.create_block_mask = with_full_blocks_apart(flex_attention.create_block_mask)
