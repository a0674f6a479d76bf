"""PendingCodes: what FSDP2 is given to gather, cast right into the memory that it sends.

FSDP2 copies the inputs of an all-gather side by side into one tensor, by an operator of its own. The weights of a group
are cast when that runs, into that tensor, by one launch where kernels take them together. No codes are copied or kept.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from f8sub.capture import current_capture
from f8sub.kernels import cuda
from f8sub.kernels.triton.support import ALIGNMENT
from f8sub.torch_compat import (
    ALL_GATHER_COPY_IN,
    is_capturing,
    no_torch_function,
    tree_map_only,
    unknown_operator,
)

if TYPE_CHECKING:
    from f8sub.weights.shard import Shard
    from f8sub.weights.weight import Weight


class PendingCodes(torch.Tensor):
    """uint8 codes of a shard, in the shape that FSDP2 is told, without memory. Other operators get them cast.

    Attributes:
        shard: whose codes they are.
        source: what is cast: the shard, on the device that gathers it.
    """

    __torch_function__ = no_torch_function

    shard: "Shard"
    source: "Weight"

    @staticmethod
    def __new__(cls: type["PendingCodes"], shard: "Shard", source: "Weight") -> "PendingCodes":
        """Cast nothing yet."""
        self: PendingCodes = torch.Tensor._make_wrapper_subclass(
            cls, shard.sent_shape, dtype=torch.uint8, device=source.device
        )
        self.shard, self.source = shard, source
        return self

    @override
    def view(self, *shape: Any) -> torch.Tensor:
        """The same: FSDP2 flattens inputs and asks for bytes, before the operator that copies them."""
        return self if shape in ((-1,), (torch.uint8,)) else self.codes().view(*shape)

    def codes(self) -> torch.Tensor:
        """The codes, in memory of their own."""
        return self.shard.layout.stacked(self.shard.cast(self.source))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name() == ALL_GATHER_COPY_IN:
            return _copy_in(*args)
        if func is torch.ops.aten.copy_.default and isinstance(args[1], PendingCodes):
            cast_into([args[1]], [args[0]])
            return args[0]
        if func.namespace == "fsdp":
            raise unknown_operator(func.name())
        args, kwargs = tree_map_only(PendingCodes, lambda each: each.codes(), (args, kwargs or {}))
        return func(*args, **kwargs)


class Casts:
    """The casts of weights that are gathered together, worked out once; holds no tensor of theirs."""

    def __init__(self, pending: Sequence[PendingCodes], outs: Sequence[torch.Tensor]) -> None:
        self.state = _state(pending, outs)
        shards = [each.shard for each in pending]
        parts = [own.part_of(each.source) for own, each in zip(shards, pending, strict=True)]
        self._short = [n for n, own in enumerate(shards) if own.values.shape != own.wire.padded_shape]
        self._together, self._alone = cuda.cast_together(parts, outs)

    def run(self, pending: Sequence[PendingCodes], outs: Sequence[torch.Tensor]) -> None:
        """Cast the weights as they are now."""
        for number in self._short:
            outs[number].zero_()
        if self._together is not None:
            self._together(outs[0])
        for number in self._alone:
            shard, source = pending[number].shard, pending[number].source
            shard.cast_into(outs[number].view(shard.wire.padded_shape), shard.layout.matrix(source.plain))


def _state(pending: Sequence[PendingCodes], outs: Sequence[torch.Tensor]) -> list[Any]:
    """What the casts depend on besides values.

    A graph that ``graph_step`` captures keeps what launched steps worked out, and any other has to do without.
    """
    begin = outs[0].data_ptr()
    found: list[Any] = [begin % ALIGNMENT, current_capture() is None and is_capturing(outs[0])]
    for each, out in zip(pending, outs, strict=True):
        shard, source, scale = each.shard, each.source, each.shard.scales.scale
        found += shard, shard.dtype, source.data_ptr(), source.stride(), scale.data_ptr()
        found.append(out.data_ptr() - begin)
    return found


def _copy_in(
    inputs: Sequence[torch.Tensor], gathered: torch.Tensor, sizes: Sequence[int], size: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    own = gathered.narrow(0, size * rank, size)
    outs = own.split(sizes)
    plain = [number for number, each in enumerate(inputs) if not isinstance(each, PendingCodes)]
    if plain:
        torch._foreach_copy_([outs[number] for number in plain], [inputs[number] for number in plain])
    pending = [(each, out) for each, out in zip(inputs, outs, strict=True) if isinstance(each, PendingCodes)]
    cast_into([each for each, _ in pending], [out for _, out in pending])
    return own, gathered


def cast_into(pending: Sequence[PendingCodes], outs: Sequence[torch.Tensor]) -> None:
    """Cast each into contiguous bytes of one memory; together, where kernels do."""
    first = pending[0].shard
    if first.casts is None or first.casts.state != _state(pending, outs):
        first.casts = Casts(pending, outs)
    if (capture := current_capture()) is not None:
        capture.keep(first.casts)
    first.casts.run(pending, outs)
