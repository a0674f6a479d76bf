"""Casts of large shards in high precision that FSDP2 gathers, an embedding's say: one by one, at a copy's speed."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from f8sub.torch_compat import ALL_GATHER_COPY_IN, DispatchMode
from f8sub.weights.shard import pieces_of

LARGE = 2**20
"""Elements of a shard from which one launch takes the host less time than the GPU saves."""


def around(shards: Sequence[torch.Tensor]) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the context in which FSDP2 casts and gathers these, each flat, in high precision."""
    return _Casts if any(shard.numel() >= LARGE for shard in shards) else contextlib.nullcontext


class _Casts(DispatchMode):  # type: ignore[misc]
    """Has FSDP2 cast each large shard in high precision by itself, where it can right into the all-gather's memory.

    FSDP2 casts the parameters of a group by one kernel for many tensors, at a third of a copy's speed, and copies them
    into that memory then. Values are the same. Times: docs/measurements/several_gpus.md, "Weights gathered in place".
    """

    def __init__(self) -> None:
        """Cast nothing yet."""
        super().__init__()
        self._waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Results that are not filled, and what is cast into them, by the address of a result."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Put off casts of large tensors until an operator may read them."""
        if func.name() == "aten::_foreach_copy_":
            self._cast()
            return self._foreach_copy(*args)
        if func.name() == ALL_GATHER_COPY_IN and self._waiting:
            return self._copy_in(func, *args)
        if func not in _READ_NO_VALUES:
            self._cast()
        return func(*args, **(kwargs or {}))

    def __exit__(self, *raised: Any) -> None:
        """Cast what no operator has read."""
        super().__exit__(*raised)
        self._cast()

    def _cast(self) -> None:
        for result, source in self._waiting.values():
            result.copy_(source)
        self._waiting.clear()

    def _foreach_copy(self, results: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        together = []
        for result, source in zip(results, sources, strict=True):
            if result.dtype != source.dtype and result.numel() >= LARGE:
                self._waiting[result.data_ptr()] = result, source
            else:
                together.append((result, source))
        _together(together)

    def _copy_in(
        self,
        copy_in: Any,
        inputs: Sequence[torch.Tensor],
        gathered: torch.Tensor,
        sizes: Sequence[int],
        size: int,
        rank: int,
    ) -> Any:
        result, _ = next(iter(self._waiting.values()))
        if gathered.dtype != result.dtype:
            # Bytes, because float8 data are gathered with these: their pieces may begin at odd addresses.
            self._cast()
            return copy_in(inputs, gathered, sizes, size, rank)
        own, pieces = pieces_of(gathered, sizes, size, rank)
        together = []
        for each, piece in zip(inputs, pieces, strict=True):
            if (waiting := self._waiting.pop(each.data_ptr(), None)) is not None:
                piece.copy_(waiting[1])
            else:
                together.append((piece, each))
        _together(together)
        return own, gathered


def _together(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])


_READ_NO_VALUES = (
    torch.ops.aten.detach.default,
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.view.default,
    torch.ops.aten.view.dtype,
)
