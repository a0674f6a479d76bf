"""Casting the weights that are gathered next together with the one that is gathered now: a launch for many.

A launch keeps the host about as long as its kernel keeps the GPU, and a trainer that waits for the GPU once a step, as
torchtitan does, has no lead to hide that in: its forward is as fast as the host.
"""

from collections.abc import Callable

import torch

from f8sub.kernels.triton import parts, quantize_cuda
from f8sub.kernels.triton.parts import Casts, Part
from f8sub.weights.shard import Shard

FIRST = 1 << 27
"""Elements that are cast with a step's first gather. It waits for them: 0.2 ms on an H200."""

GROWTH = 4
"""How many times as many are cast with the next gather whose weight has no codes: what comes before it hides more."""


class CastAhead:
    """The weights of an exchange in the order in which they were gathered first, and how those after one are cast."""

    def __init__(self) -> None:
        self._order: list[Shard] = []
        self._place: dict[Shard, int] = {}
        self._generation = -1
        self._most = FIRST
        self._known: dict[tuple[object, ...], Casts] = {}

    def cast(self, shard: Shard, generation: int, may_cast: Callable[[Shard], bool]) -> None:
        """Cast a shard that is about to be gathered, and the next ones, where kernels take them together.

        Args:
            shard: has no codes of its weight as it is.
            generation: which scales the table holds.
            may_cast: whether the scales that the table holds are those of another shard.
        """
        place = self._place.get(shard)
        if place is None:
            self._place[shard] = len(self._order)
            self._order.append(shard)
            return
        if generation != self._generation:
            self._generation, self._most = generation, FIRST
        else:
            self._most *= GROWTH
        own = shard.as_part
        if own is None or not parts.takes(own):
            return
        found: list[tuple[Shard, Part]] = []
        room = self._most
        for each in self._order[place:]:
            if room <= 0:
                break
            if each is not shard and (each.has_codes(generation) or not may_cast(each)):
                continue
            part = each.as_part
            if part is None or not each.master.owns_storage or not parts.takes(part):
                continue
            found.append((each, part))
            room -= part.x.numel()
        if len(found) > 1:
            self._cast(found, generation)

    def _cast(self, found: list[tuple[Shard, Part]], generation: int) -> None:
        of_many = [part for _, part in found]
        key = tuple((p.x.data_ptr(), p.x.shape, p.scale.data_ptr(), p.through) for p in of_many)
        casts = self._known.get(key)
        if casts is None:
            if len(self._known) >= len(self._order):
                self._known.clear()
            casts = self._known[key] = quantize_cuda.casts_of(of_many)
        with torch.inference_mode(mode=False):
            codes = [shard.room_for_codes(part.x) for shard, part in found]
            casts.run(codes)
        for (shard, _), made in zip(found, codes, strict=True):
            shard.cast_along(made, generation)
