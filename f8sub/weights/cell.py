"""Cell: what a weight's storage remembers of writes to it, and of what was cast from it."""

import itertools
import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from f8sub.formats import Operand

State = tuple[int, int, int]
"""Which storage a weight lies in, and what was written to it, see ``MasterWeight.state``."""

_numbers = itertools.count(1)


class Cell:
    """What all views of one storage share.

    Attributes:
        number: another one for every cell of this process. FSDP2 gives a weight new storages, whose counts of writes
            may be those of the old one.
        epoch: number of operators that wrote to the storage.
        storage: that storage, referred to weakly, so that its address cannot become another one's;
            ``p.data = t`` replaces a weight's storage without any operator running.
        cast: the codes cast last and what they were cast from, see ``rowwise_of``.
        layers: the layers converted together with the weight's own, while one of them is alive; None for a weight of
            no layer. Not held: a view of a weight holds it where no garbage collector sees, and the layers lead to
            that view, so that no model would ever be freed.
        fqn: name of its own layer, or of one of them.
        replayed: whether a CUDA graph recorded what writes to the storage: its replays change it unseen.
        taken: whether an optimizer holds the weight as the master of a primary weight.
        shared: whether plain tensors may lie in the storage, such as a state dict's: who writes to those is not seen.
    """

    __slots__ = (
        "_copied",
        "_layers",
        "cast",
        "epoch",
        "fqn",
        "number",
        "replayed",
        "shared",
        "storage",
        "taken",
    )

    def __init__(self, storage: StorageWeakRef | None) -> None:
        self.number = next(_numbers)
        self.epoch = 0
        self.storage = storage
        self.cast: tuple[tuple[Any, ...], Operand] | None = None
        self._layers: weakref.ref[Any] | None = None
        self.fqn = ""
        self.replayed = self.taken = self.shared = False
        self._copied: tuple[Cell, int, int, torch.Size] | None = None

    def belongs_to(self, layers: Any, fqn: str) -> None:
        """Enter the layer that the weight is of."""
        self._layers, self.fqn = None if layers is None else weakref.ref(layers), fqn

    @property
    def layers(self) -> Any:  # noqa: D102
        return None if self._layers is None else self._layers()

    def mark_copy_of(self, source: "Cell", shape: torch.Size) -> None:
        """Remember that a view of ``shape`` was just filled from one of ``source``'s."""
        self._copied = (source, source.epoch, self.epoch, shape)

    def copies(self, source: "Cell", shape: torch.Size) -> bool:
        """Whether a view of ``shape`` was copied from ``source`` and neither storage changed since."""
        return self._copied == (source, source.epoch, self.epoch, shape)
