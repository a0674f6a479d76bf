"""PendingCodes: what FSDP2 is given to gather, cast right into the memory that it sends.

FSDP2 copies the inputs of an all-gather side by side into one tensor, by an operator of its own. The weights of a group
are cast when that runs, into that tensor, by one launch where kernels take them together. So codes are not copied, nor
kept from one all-gather to the next.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from typing_extensions import override

from f8sub.kernels.triton import quantize_cuda
from f8sub.kernels.triton.support import ALIGNMENT
from f8sub.torch_compat import is_capturing

if TYPE_CHECKING:
    from f8sub.weights.shard import Shard
    from f8sub.weights.weight import Weight

COPY_IN = "fsdp::all_gather_copy_in"
"""FSDP2's operator in torch 2.11 and 2.13: inputs, memory of all ranks, the inputs' sizes, their sum, the rank."""


class PendingCodes(torch.Tensor):
    """uint8 codes of a shard, in the shape that FSDP2 is told, without memory. Other operators get them cast.

    Attributes:
        shard: whose codes they are.
        source: what is cast: the shard, on the device that gathers it.
        casts: those of the weights that it was gathered with last, if it was the first of them.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    shard: "Shard"
    source: "Weight"
    casts: "Casts | None"

    @staticmethod
    def __new__(cls: type["PendingCodes"], shard: "Shard", source: "Weight") -> "PendingCodes":
        """Cast nothing yet."""
        self: PendingCodes = torch.Tensor._make_wrapper_subclass(
            cls, shard.sent_shape, dtype=torch.uint8, device=source.device
        )
        self.shard, self.source, self.casts = shard, source, None
        return self

    def __init__(self, shard: "Shard", source: "Weight") -> None:
        super().__init__()

    @override
    def view(self, *shape: Any) -> torch.Tensor:
        """The same: FSDP2 flattens inputs and asks for bytes, before the operator that copies them."""
        return self if shape in ((-1,), (torch.uint8,)) else self.codes().view(*shape)

    @property
    def values(self) -> torch.Tensor:
        """What is cast, as a matrix."""
        return self.shard.layout.matrix(self.source.plain)

    def codes(self) -> torch.Tensor:
        """The codes, in memory of their own."""
        return self.shard.layout.stacked(self.shard.cast(self.source))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PendingCodes({self.shard.fqn}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name() == COPY_IN:
            return _copy_in(*args)
        if func is torch.ops.aten.copy_.default and isinstance(args[1], PendingCodes):
            cast_into([args[1]], [args[0]])
            return args[0]
        args, kwargs = pytree.tree_map_only(PendingCodes, lambda each: each.codes(), (args, kwargs or {}))
        return func(*args, **kwargs)


class Casts:
    """The casts of weights that are gathered together, worked out once.

    It keeps no tensor that lies in the weights' memory: that would outlive ``p.data = t``.
    """

    def __init__(self, pending: Sequence[PendingCodes], outs: Sequence[torch.Tensor]) -> None:
        self._state = _state(pending, outs)
        self._pending = list(pending)
        self._short, self._alone, parts = [], [], []
        numbers = []
        for number, each in enumerate(pending):
            values, wire = each.values, each.shard.wire.padded_shape
            if values.shape != wire:
                self._short.append(number)
            part = each.shard.part_of(values) if values.numel() else None
            # A replayed graph would read what is told of the parts from host memory that has become another tensor's.
            if part is None or is_capturing(outs[number]):
                self._alone.append(number)
            else:
                parts.append(part)
                numbers.append(number)
        self._first = numbers[0] if numbers else 0
        self._together, left = (
            quantize_cuda.cast_together(parts, [outs[number] for number in numbers]) if parts else (None, [])
        )
        self._alone += [numbers[number] for number in left]

    def fit(self, pending: Sequence[PendingCodes], outs: Sequence[torch.Tensor]) -> bool:
        """Whether they are these, and lie where these did."""
        return self._state == _state(pending, outs)

    def run(self, outs: Sequence[torch.Tensor]) -> None:
        """Cast the weights as they are now."""
        for number in self._short:
            outs[number].zero_()
        if self._together is not None:
            self._together(outs[self._first])
        for number in self._alone:
            each = self._pending[number]
            each.shard.cast_into(outs[number].view(each.shard.wire.padded_shape), each.values)


def _state(pending: Sequence[PendingCodes], outs: Sequence[torch.Tensor]) -> list[Any]:
    """What the casts depend on besides values."""
    begin = outs[0].data_ptr()
    found: list[Any] = [begin % ALIGNMENT, is_capturing(outs[0])]
    for each, out in zip(pending, outs, strict=True):
        shard = each.shard
        found += (id(each), each.source.data_ptr(), shard.scales.scale.data_ptr(), shard.dtype)
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
    first = pending[0]
    if first.casts is None or not first.casts.fit(pending, outs):
        first.casts = Casts(pending, outs)
    first.casts.run(outs)
