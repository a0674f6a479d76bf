"""Weight: a parameter that codes are cast from, with the hooks by which FSDP2 gathers those.

[Note: from a shard to an unsharded weight]

    MasterWeight --fsdp_pre_all_gather--> uint8 codes --all-gather--> --fsdp_post_all_gather--> Float8Tensor(rowwise)

- A MasterWeight is a parameter's local tensor in high precision. Its cell (``record.py``) is shared by all views of a
  storage and counts what was written to it.
- A WeightRecord (``record.py``) is what a weight is, whatever tensor holds it: FSDP2 pads, moves and re-makes
  tensors.
- A Conversion (``conversion.py``) has the records of one ``convert_to_float8``. Before the first all-gather it enters
  those that are sharded: it compares them across ranks, and gives each a shard and an exchange.
- A Shard (``shard.py``) is this rank's part: where it lies, its scales, its codes, which are cast once a step.
- The wire (``layout.py``) is what is sent of a shard: one uint8 matrix, with scales either in its rows or not sent.
  That form alone is right for uneven and empty shards, Shard(1), shard groups of one, HSDP, gloo and NCCL alike.
- An Exchange (``exchange.py``) has the scales; see the note there.

The hooks keep nothing: FSDP2 calls them more often than once a pass.
"""

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from f8sub.errors import Float8ConfigError
from f8sub.formats import Operand
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import preset_signature
from f8sub.weights.record import WeightRecord

if TYPE_CHECKING:
    from f8sub.weights.master_weight import MasterWeight
    from f8sub.weights.shard import Shard

Metadata = tuple["Shard", str | None]
"""The shard, and the ticket of ``Exchange.gather_input``."""


class Weight(torch.Tensor):
    """What ``MasterWeight`` is, and any other kind of weight that has one.

    FSDP2 finds the hooks on the local tensor of a parameter, where its record says that it is gathered as float8.
    """

    keeps_codes: bool = False
    """Whether the codes that were cast stay for as long as the weight does."""

    rowwise_codes: ClassVar[Callable[..., Operand]]
    """The rowwise operand of (weight, format, dtype, source), unsharded; of MasterWeight that is ``rowwise_of``.

    A static function: torch.compile takes a method of a tensor for an operator.
    """

    @property
    def record(self) -> WeightRecord | None:
        """The weight's record; None where it is no module's."""
        raise NotImplementedError

    @property
    def master(self) -> "MasterWeight | None":
        """The values in high precision; None where there are codes alone."""
        raise NotImplementedError

    @property
    def plain(self) -> torch.Tensor:
        """The values as an ordinary tensor."""
        raise NotImplementedError

    def exported_as(self, parameter: torch.Tensor) -> torch.Tensor:
        """What a state dict holds of ``parameter``, whose local tensor this is: in the same memory, without a graph."""
        raise NotImplementedError

    def was_gathered(self, shard: "Shard") -> None:
        """Codes of the weight as it is, with scales of its own, were gathered from all ranks."""

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., Any]:
        """This rank's codes, cast once a step: one uint8 tensor of ``WireFormat.padded_shape``, and metadata.

        Rows that are not one byte an element, packed or followed by their scales, take the shorter form of the hook.
        FSDP2 checks the size of what the other form returns, on ranks with a short shard alone, while the others wait
        for ever; it does not check this form, which is told less.
        """
        form = _rows_to_wire if self._wire_record().in_rows else _codes_to_wire
        return types.MethodType(form, self)

    @property
    def fsdp_post_all_gather(self) -> Callable[..., Any]:
        """The unsharded weight, rowwise only; its columnwise operand is made in backward and freed there.

        Later calls find codes and scales already in place: both are views of memory that FSDP2 and the exchange
        write to.
        """
        self._wire_record()
        return self._from_wire

    def _wire_record(self) -> WeightRecord:
        """The record.

        Raises:
            AttributeError: FSDP2 gathers the weight in high precision, and looks for no hooks then.
        """
        record = self.record
        if record is None or not record.gathered:
            raise AttributeError("the weight is gathered in high precision")
        return record

    def _from_wire(
        self,
        all_gather_outputs: tuple[torch.Tensor],
        metadata: Metadata,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[Float8Tensor, tuple[torch.Tensor]] | None:
        (gathered,), (shard, ticket) = all_gather_outputs, metadata
        if ticket is not None:
            shard.exchange.resolve(shard, self, gathered, ticket)
        else:
            self.was_gathered(shard)
        if out is not None:
            return None
        codes, scale_inv = shard.wire.unsharded(gathered)
        scale_inv = shard.part_scale_inv if scale_inv is None else scale_inv
        rowwise = Operand(codes, scale_inv, shard.format, shard.global_scale_inv)
        return Float8Tensor(rowwise, None, param_dtype, shard.layout.leading), (gathered,)


def _codes_to_wire(
    weight: Weight,
    mesh: DeviceMesh,
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: torch.nn.Module,
    mp_policy: MixedPrecisionPolicy,
) -> tuple[tuple[torch.Tensor], Metadata]:
    record = weight._wire_record()
    converted = getattr(module, "converted", None)
    if converted is None or not converted.owns(module):
        raise Float8ConfigError(
            f"a {type(weight).__name__} is a parameter of a {type(module).__name__}; only a module that was converted "
            "can read the float8 that is gathered of it"
        )
    return _to_wire(weight, record)


def _rows_to_wire(weight: Weight, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor], Metadata]:
    return _to_wire(weight, weight._wire_record())


def _to_wire(weight: Weight, record: WeightRecord) -> tuple[tuple[torch.Tensor], Metadata]:
    if record.conversion is None:
        raise RuntimeError(f"{record.fqn}: its weight is gathered and its module is gone")
    shard = record.conversion.shard_of(record)
    codes, ticket = shard.exchange.gather_input(shard, weight)
    return (shard.layout.stacked(codes),), (shard, ticket)


preset_signature(_codes_to_wire)
preset_signature(_rows_to_wire)


def master_of(local: torch.Tensor) -> "MasterWeight | None":
    """The high-precision values behind a parameter's local tensor; None for a plain tensor or codes alone."""
    return local.master if isinstance(local, Weight) else None


def local_tensor(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded parameter, or the whole of any other."""
    return weight._local_tensor if isinstance(weight, DTensor) else weight


def like_sharded(local: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``local`` as this rank's part of a tensor that is sharded as ``weight`` is; itself where that is not."""
    if not isinstance(weight, DTensor):
        return local
    mesh, placements, shape, stride = weight.device_mesh, weight.placements, weight.shape, weight.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def exported(weight: torch.Tensor) -> torch.Tensor:
    """A weight, or an optimizer's master of one, as a state dict holds it: in the same memory, without a graph."""
    local = local_tensor(weight)
    return local.exported_as(weight) if isinstance(local, Weight) else weight.detach()


def take_place(new: torch.nn.Parameter, old: torch.Tensor) -> bool:
    """Make the Python object ``old`` be what ``new`` is, with what users and autograd left on it.

    Optimizers, ties and modules that hold ``old`` then hold the new one. ``new`` gets gradient, hooks and attributes
    in any case.

    Returns:
        False where torch cannot swap the two, because something else refers to the tensor (a weak reference, an
        autograd graph); the caller then has to replace the reference itself.
    """
    new.grad = old.grad
    new._backward_hooks = old._backward_hooks
    new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    own: Any = getattr(type(old), "OWN_ATTRIBUTES", ())
    for name, value in vars(old).items():
        if name not in own:
            setattr(new, name, value)
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:
        return False
    return True
