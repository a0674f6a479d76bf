"""What a weight is, and what its storage remembers: WeightRecord and Cell.

A record is one a weight, whatever tensor holds it: FSDP2 pads, moves and re-makes those. A cell is one a storage.
"""

import itertools
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from f8sub.formats import ALL, Float8Format, Operand, Tile

if TYPE_CHECKING:
    from f8sub.weights.conversion import Conversion
    from f8sub.weights.shard import Shard

State = tuple[int, int, int]
"""Which storage a weight lies in, and what was written to it, see ``MasterWeight.state``."""

_numbers = itertools.count(1)


def lies_in_rows(tile: Tile) -> bool:
    """Whether a row of a matrix has tiles of its own, several of them."""
    return tile.rows == 1 and tile.cols != ALL


class WeightOwner(Protocol):
    """A module with weights that f8sub casts."""

    converted: "Conversion"

    def weight_described(self, name: str, device: torch.device) -> dict[str, str]:
        """What every rank must have alike of the parameter ``name``, which ``device`` gathers."""


class WeightRecord:
    """What a weight is to FSDP2 and to a GEMM.

    Holds neither the module, nor the conversion, nor the shard: tensors hold the record where no garbage collector
    sees, and those lead back to the tensors, so that no model would ever be freed.

    Attributes:
        fqn: the name in errors and reports: the layer's, where that has one weight.
        name: the parameter's name in its module.
        format: the rowwise codes' format; None where no GEMM reads the weight in float8.
        gathered: whether FSDP2 gathers the weight as float8.
        in_rows: whether a row on the wire is not one byte an element: it is packed, or its scales follow.
        entered: whether the ranks that shard the weight compared it.
        last_step: the last optimizer step of the conversion that stepped this weight; 0 for none.
    """

    def __init__(
        self,
        conversion: "Conversion",
        module: torch.nn.Module,
        name: str,
        fqn: str,
        format: Float8Format | None,
        gathered: bool,
    ) -> None:
        self.fqn, self.name, self.format, self.gathered = fqn, name, format, gathered
        self.in_rows = format is not None and (format.codes_per_byte > 1 or lies_in_rows(format.tile))
        self.entered = False
        self.last_step = 0
        self._shard: weakref.ref[Shard] | None = None
        self._conversion, self._module = weakref.ref(conversion), weakref.ref(module)

    @property
    def conversion(self) -> "Conversion | None":
        """The weights converted together with this one, while any of their modules is alive."""
        return self._conversion()

    @property
    def shard(self) -> "Shard | None":
        """This rank's part of the weight; None where it is not sharded, or gathered in high precision."""
        return None if self._shard is None else self._shard()

    @shard.setter
    def shard(self, shard: "Shard") -> None:
        self._shard = weakref.ref(shard)

    @property
    def module(self) -> Any:
        """The ``WeightOwner``; None when it is gone."""
        return self._module()

    @property
    def parameter(self) -> torch.Tensor | None:
        """What the module has in the weight's place now: sharded, unsharded, or None."""
        module = self.module
        return None if module is None else module._parameters.get(self.name)


class Cell:
    """What all views of one storage share.

    Attributes:
        number: unique in this process. FSDP2 gives a weight new storages, whose counts of writes may be the old one's.
        epoch: number of operators that wrote to the storage.
        storage: that storage, referred to weakly, so that its address cannot become another one's;
            ``p.data = t`` replaces a weight's storage without any operator running.
        cast: the codes cast last and what they were cast from, see ``rowwise_of``.
        record: the weight's; one of them where modules share it; None where it is no module's.
        replayed: whether a CUDA graph recorded what writes to the storage: its replays change it unseen.
        taken: whether an optimizer holds the weight as the master of a primary weight.
        shared: whether plain tensors may lie in the storage, such as a state dict's: who writes to those is not seen.
    """

    __slots__ = ("_copied", "cast", "epoch", "number", "record", "replayed", "shared", "storage", "taken")

    def __init__(self, storage: StorageWeakRef | None) -> None:
        self.number = next(_numbers)
        self.epoch = 0
        self.storage = storage
        self.cast: tuple[tuple[Any, ...], Operand] | None = None
        self.record: WeightRecord | None = None
        self.replayed = self.taken = self.shared = False
        self._copied: tuple[Cell, int, int, torch.Size] | None = None

    def mark_copy_of(self, source: "Cell", shape: torch.Size) -> None:
        """Remember that a view of ``shape`` was just filled from one of ``source``'s."""
        self._copied = (source, source.epoch, self.epoch, shape)

    def copies(self, source: "Cell", shape: torch.Size) -> bool:
        """Whether a view of ``shape`` was copied from ``source`` and neither storage changed since."""
        return self._copied == (source, source.epoch, self.epoch, shape)
