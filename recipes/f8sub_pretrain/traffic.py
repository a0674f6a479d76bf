"""Count what goes over the wire, at the calls that FSDP2, FSDP1 and f8sub make to ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


@dataclass
class Traffic:
    """What this rank has gathered and reduced since counting began."""

    all_gather_bytes: int = 0
    """Bytes that came out of all-gathers: of all ranks together, this one's own shard included."""
    reduced_bytes: int = 0
    """Bytes that went into reduce-scatters, and into the exchanges that float8 gradients have in their place."""
    amax_all_reduces: int = 0
    """All-reduces of a flat table that take the maximum, as those of the scales do; a monitor's tables are matrices."""


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count collectives until the end of the ``with`` block.

    Yields:
        The running totals.
    """
    traffic = Traffic()

    def counted_all_gather(call: Callable[..., Any]) -> Callable[..., Any]:
        def all_gather(output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            traffic.all_gather_bytes += output_tensor.numel() * output_tensor.element_size()
            return call(output_tensor, *args, **kwargs)

        return all_gather

    all_gather_call = dist.all_gather

    def all_gather_of_list(tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        # FSDP1 on CPUs gathers into parts of one tensor; lists of small tensors of their own are what ranks tell.
        if len(tensors) > 1 and len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1:
            traffic.all_gather_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return all_gather_call(tensors, *args, **kwargs)

    def counted_reduction(call: Callable[..., Any]) -> Callable[..., Any]:
        def reduction(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            traffic.reduced_bytes += input.numel() * input.element_size()
            return call(output, input, *args, **kwargs)

        return reduction

    in_place_call = dist.ProcessGroup.allgather_into_tensor_coalesced

    def all_gather_in_place(group: Any, outputs: list[torch.Tensor], *args: Any) -> Any:
        # f8sub gathers converted models so on GPUs, into the memory of each weight.
        traffic.all_gather_bytes += sum(output.numel() * output.element_size() for output in outputs)
        return in_place_call(group, outputs, *args)

    all_reduce_call = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        traffic.amax_all_reduces += op == dist.ReduceOp.MAX and tensor.dim() == 1
        return all_reduce_call(tensor, op, *args, **kwargs)

    with ExitStack() as patches:
        # torch <= 2.12 does not have the names that end with "single"; FSDP2 of 2.13 calls those.
        counted = {
            "all_gather_into_tensor": counted_all_gather,
            "all_gather_single": counted_all_gather,
            "reduce_scatter_tensor": counted_reduction,
            "reduce_scatter_single": counted_reduction,
            "all_to_all_single": counted_reduction,
        }
        for name, count in counted.items():
            if hasattr(dist, name):
                patches.enter_context(mock.patch.object(dist, name, count(getattr(dist, name))))
        patches.enter_context(mock.patch.object(dist, "all_gather", all_gather_of_list))
        patches.enter_context(mock.patch.object(dist, "all_reduce", all_reduce))
        name = "allgather_into_tensor_coalesced"
        patches.enter_context(mock.patch.object(dist.ProcessGroup, name, all_gather_in_place))
        yield traffic
