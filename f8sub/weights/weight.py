"""WeightRecord, which knows a weight's module and shard; and Weight, a parameter with FSDP2's all-gather hooks.

[Note: from a shard to an unsharded weight]

    MasterWeight --fsdp_pre_all_gather--> PendingCodes --cast--> uint8 codes --all-gather--> --fsdp_post_all_gather-->
    Float8Tensor(rowwise)

- A MasterWeight (``master_weight.py``) is a parameter's local tensor in high precision. All views of its storage share
  a cell, which counts what was written. A WeightRecord is one per weight: FSDP2 pads, moves and re-makes tensors.
- A Conversion (``conversion.py``) has the records of one ``convert_to_float8``. Before the first all-gather it compares
  those that are sharded across ranks, and gives each a shard and an exchange.
- A Shard (``shard.py``) is this rank's part. It is cast right into the memory that FSDP2 sends.
  The wire (``layout.py``) is what is sent: one uint8 matrix, with scales in its rows or none.
  That form alone is right for uneven and empty shards, Shard(1), shard groups of one, HSDP, gloo and NCCL alike. The
  scales come from an Exchange (``exchange.py``).
- The hooks keep nothing: FSDP2 calls them more often than once a pass.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from f8sub.errors import Float8ConfigError, Float8Warning
from f8sub.formats import Float8Format, Operand, lies_in_rows
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import (
    bound_hook,
    gathered_among,
    gathered_parameters,
    is_dtensor,
    is_swapped_with_itself,
)
from f8sub.weights.layout import ALONG_ROWS, cannot_be_gathered

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from f8sub.weights.conversion import Conversion
    from f8sub.weights.master_weight import MasterWeight
    from f8sub.weights.shard import Shard

Metadata = tuple["Shard", str | None]
"""The shard, and the ticket of ``Exchange.gather_input``."""


RAW = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.itemsize == 1 and dtype != torch.bool
)
"""The dtypes of codes: of one byte, float8 or integers."""

STATE = "_f8sub"
"""The one attribute that a converted module has of f8sub: its ``LayerState``, see ``linear/converted.py``."""


BESIDE = "_f8sub_beside"
"""The one attribute of f8sub that a module has which is not converted, where something follows one of its parameters:
an ``Anchor``."""


class Anchor(NamedTuple):
    """Is beside a parameter that f8sub does not change: the ranks that hold it share the histories of ``attends``.

    Attributes:
        conversion: has a record of the parameter.
        attends: states of the attention near it.
    """

    conversion: "Conversion"
    attends: Sequence[torch.nn.Module]


class WeightRecord:
    """Knows a weight's name, format, module and shard, for FSDP2's hooks and for GEMMs.

    Module, conversion and shard are referred to weakly. Tensors hold the record where no garbage collector sees it, and
    those three lead back to the tensors: no model would ever be freed.

    Attributes:
        fqn: the name in errors and reports.
        format: the rowwise operand's format; None where no GEMM reads the weight in float8.
        gathered: whether FSDP2 gathers the weight as float8.
        in_rows: whether a row on the wire is not one byte per element: it is packed, or its scales follow.
        entered: whether the ranks that shard the weight compared it.
        told: whether a warning said that another module took the place of the weight's.
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
        self.entered = self.told = False
        self._shard: weakref.ref[Shard] | None = None
        self._conversion, self._module = weakref.ref(conversion), weakref.ref(module)

    @property
    def conversion(self) -> "Conversion | None":
        """The weights converted together with this one, while any of their modules is alive."""
        return self._conversion()

    @property
    def shard(self) -> "Shard | None":
        """This rank's part of the weight; None where it is not sharded, or no exchange makes its scales."""
        return None if self._shard is None else self._shard()

    @shard.setter
    def shard(self, shard: "Shard") -> None:
        self._shard = weakref.ref(shard)

    @property
    def module(self) -> Any:
        """The module, None when it is gone."""
        return self._module()

    @property
    def parameter(self) -> torch.Tensor | None:
        """The tensor that the module has in the weight's place now: sharded, unsharded, or None."""
        module = self._module()
        return None if module is None else module._parameters.get(self.name)

    def settle_layout(self) -> None:
        """Have FSDP2 gather the weight in high precision, with a warning, where no float8 data could be gathered."""
        if cannot_be_gathered(self.parameter, self.format):
            self.gathered = False
            warnings.warn(
                f"{self.fqn} is gathered in high precision: {ALONG_ROWS.format(self.format)}",
                Float8Warning,
                stacklevel=2,
            )

    def follow(self) -> bool:
        """Have the shard use what the parameter holds now, if that is sharded; False where there is no shard."""
        shard = None if self._shard is None else self._shard()
        held = getattr(self.parameter, "_local_tensor", None) if shard else None
        if shard is not None and held is not None and held is not shard.master:
            shard.follow(held)
        return shard is not None


class Weight(torch.Tensor):
    """A parameter's local tensor, on which FSDP2 finds the hooks if the weight is gathered as float8."""

    rowwise_codes: ClassVar[Callable[..., Operand]]
    """``rowwise_of`` of such a weight; static, because torch.compile takes a tensor's methods for operators."""

    @property
    def record(self) -> WeightRecord | None:
        """The weight's record; None where it is no module's."""
        raise NotImplementedError

    @property
    def master(self) -> "MasterWeight | None":
        """The values in high precision; None where there is float8 data alone."""
        raise NotImplementedError

    @property
    def cast_by_shard(self) -> "MasterWeight | None":
        """The master that a shard of the weight casts; an empty one where float8 data were loaded before the shard."""
        return self.master

    @property
    def plain(self) -> torch.Tensor:
        """The values as an ordinary tensor."""
        raise NotImplementedError

    def exported_as(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what a state dict holds of ``parameter``, whose local tensor this is: same memory, without a graph."""
        raise NotImplementedError

    def _use_count(self) -> int:
        """Return the count that ``torch.utils.swap_tensors`` compares, at most 2: it refuses a third reference.

        A graph that saved this weight is such a reference. ``torch.nn.utils.parametrize`` and ``Module.to`` swap
        weights of such classes, and write to all others, which a graph does not prevent. With two references torch has
        backward of that graph raise an error; but with one that is swapped with itself, which stays what it is.
        """
        count: int = super()._use_count()  # type: ignore[misc]
        return 1 if is_swapped_with_itself(self) else min(count, 2)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A checkpoint that pickles parameters opens where f8sub is not installed.
        plain = self.plain
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(plain, self.requires_grad).__reduce_ex__(protocol)
        return plain.__reduce_ex__(protocol)

    def was_sharded(self, shard: "Shard") -> None:
        """Take notice of a shard that was created for the weight, of which nothing was gathered."""

    def was_gathered(self, shard: "Shard") -> None:
        """Take notice that the weight as it is was gathered from all ranks, with scales of its own."""

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., Any]:
        """Returns this rank's data, one uint8 tensor of ``Shard.sent_shape`` that may be a PendingCodes, and metadata.

        FSDP2 compares the size of what the longer form of the hook returns with the weight's, on ranks with a short
        shard alone, while the others wait for ever. Rows that are not one byte per element take the shorter form.
        """
        in_rows = self._wire_record().in_rows
        bound, hook = (_bound_rows, _rows_to_wire) if in_rows else (_bound_codes, _codes_to_wire)
        made: Callable[..., Any] = bound(hook, self)
        return made

    @property
    def fsdp_post_all_gather(self) -> Callable[..., Any]:
        """The unsharded weight, rowwise only: views of memory that FSDP2 and the exchange write to, later calls too."""
        self._wire_record()
        return self._from_wire

    def _wire_record(self) -> WeightRecord:
        """Return the record; AttributeError where FSDP2 gathers in high precision and has to find no hooks."""
        record = self.record
        # Looked at when ``fully_shard`` asks for hooks, right after it sharded the weight.
        if record is not None and not record.entered and record.gathered:
            record.settle_layout()
        if record is None or not record.gathered:
            # FSDP2 asks by ``hasattr``, which takes this error of a property for a tensor without hooks.
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
        if param_dtype is not shard.dtype:
            raise Float8ConfigError(
                f"{shard.fqn}: FSDP2 gathers its weight as {param_dtype}, and its float8 codes are of values rounded "
                f"to {shard.dtype}, by the policy that it had when it was sharded; call fully_shard with one policy, "
                "and model.to(dtype) before that"
            )
        shard.was_gathered()
        if ticket is not None:
            shard.exchange.resolve(shard, self, gathered, ticket)
        # An empty shard asks, and has nothing to have changed.
        as_known = ticket is None or not shard.master.numel()
        if as_known and shard.next_scales is None:
            self.was_gathered(shard)
        # FSDP2 gathered into the memory of the first call again: the Float8Tensor of that
        # call views it, and the scales.
        if out is not None:
            return None
        scales = shard.scales
        # rowwise w [N, K]; dgrad's columnwise operand is computed from these bytes in backward.
        codes, scale_inv = shard.wire.unsharded(gathered, scales.part_scale_inv)
        rowwise = Operand(codes, scale_inv, shard.wire.format_whole, scales.global_scale_inv)
        return Float8Tensor(rowwise, None, param_dtype, shard.layout.leading), (gathered,)


def _codes_to_wire(
    weight: Weight,
    mesh: "DeviceMesh",
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: torch.nn.Module,
    mp_policy: "MixedPrecisionPolicy",
) -> tuple[tuple[torch.Tensor], Metadata]:
    record = weight._wire_record()
    # A weight that is tied has the record of one module.
    if module is not record.module and conversion_of(module) is None:
        raise Float8ConfigError(
            f"a {type(weight).__name__} is a parameter of a {type(module).__name__}; only a module that was converted "
            "can read the float8 that is gathered of it"
        )
    return _to_wire(weight, record)


def _rows_to_wire(weight: Weight, mesh: "DeviceMesh") -> tuple[tuple[torch.Tensor], Metadata]:
    return _to_wire(weight, weight._wire_record())


def _to_wire(weight: Weight, record: WeightRecord) -> tuple[tuple[torch.Tensor], Metadata]:
    if (shard := record.shard) is None:
        if record.conversion is None:
            raise RuntimeError(f"{record.fqn}: its weight is gathered and its module is gone")
        shard = record.conversion.shard_of(record)
    # FSDP2 may have padded the shard into other memory since the last gather.
    record.follow()
    codes, ticket = shard.exchange.gather_input(shard, weight)
    return (codes,), (shard, ticket)


_bound_codes, _bound_rows = bound_hook(_codes_to_wire), bound_hook(_rows_to_wire)


def conversion_of(module: torch.nn.Module) -> "Conversion | None":
    """Return the conversion that a module's weights are of; None for a module that is not converted."""
    state = vars(module).get(STATE)
    conversion: Conversion | None = None if state is None else state.conversion
    # Code that copies attributes from module to module copies this one, too.
    return conversion if conversion is not None and conversion.owns(module) else None


def conversion_beside(module: torch.nn.Module) -> "Conversion | None":
    """Return the conversion that follows a parameter of a module which it did not convert; None where none does."""
    anchor: Anchor | None = vars(module).get(BESIDE)
    return anchor.conversion if anchor is not None and anchor.conversion.owns(module) else None


def is_converted(module: torch.nn.Module) -> bool:
    """Return whether a module has weights that were converted."""
    return conversion_of(module) is not None


def master_of(local: torch.Tensor) -> "MasterWeight | None":
    """Return the high-precision values behind a parameter's local tensor; None for a plain tensor or float8 alone."""
    return local.master if isinstance(local, Weight) else None


def refuse_gathered(call: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise where an optimizer holds parameters that FSDP2 gathered for a forward, and replaces in backward.

    Args:
        call: the function of f8sub that was given the optimizer.
        optimizer: created after a forward without a backward, perhaps.

    Raises:
        Float8ConfigError: it does, and would train nothing of them.
    """
    if found := gathered_parameters(optimizer):
        raise Float8ConfigError(f"{call}: {of_gathered(optimizer, found)}")


def replaced_by_plain(records: Iterable[WeightRecord]) -> WeightRecord | None:
    """Return the first record whose module has a plain parameter that learns, and that FSDP2 did not gather."""
    plain = {
        id(parameter): (record, parameter)
        for record in records
        if type(parameter := record.parameter) is torch.nn.Parameter and parameter.requires_grad
    }
    for gathered in gathered_among(parameter for _, parameter in plain.values()):
        del plain[id(gathered)]
    return next((record for record, _ in plain.values()), None)


def of_gathered(optimizer: torch.optim.Optimizer, found: Sequence[torch.Tensor]) -> str:
    """What to say of an optimizer that holds gathered parameters, see ``refuse_gathered``."""
    of_all = sum(len(group["params"]) for group in optimizer.param_groups)
    return (
        f"{len(found)} of the {of_all} parameters of the {type(optimizer).__name__}, the first one of shape "
        f"{tuple(found[0].shape)}, are those that FSDP2 gathered for a forward: after a forward without a backward "
        "model.parameters() gives them, backward puts the sharded ones in their place, and the optimizer trains "
        "nothing of them; create it before the first forward, or call module.reshard() on every FSDPModule first"
    )


def local_tensor(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded parameter, or the whole of any other."""
    return weight._local_tensor if is_dtensor(weight) else weight


def local_tensors(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``local_tensor`` of each of many weights, without a call of Python for each."""
    return [getattr(weight, "_local_tensor", weight) for weight in weights]


def own_parameter(module: torch.nn.Module, name: str) -> torch.Tensor:
    """Return a module's parameter, whatever parametrizations make of it; or what they, or pruning, made of several."""
    held = held_parameter(module, name)
    return weight_beside_forward(module, name) if held is None else held


def held_parameter(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """Return what ``own_parameter`` does, but None where a parametrization would compute it from several."""
    if (parameter := module._parameters.get(name)) is not None:
        return parameter
    lists: Any = module._modules.get("parametrizations")
    if lists is not None and name in lists:
        return getattr(lists[name], "original", None)
    # Pruning and the older norms leave what they computed there.
    found: torch.Tensor | None = vars(module).get(name)
    return found


MADE_OF = ("_orig", "_g", "_v")
"""Ends of the names of parameters of which ``torch.nn.utils`` computes a weight: pruning, older norms."""


def parameters_of(module: torch.nn.Module, name: str) -> list[torch.Tensor]:
    """Return the parameters that a module's weight is, or is computed from, without computing it."""
    if (parameter := module._parameters.get(name)) is not None:
        return [parameter]
    lists: Any = module._modules.get("parametrizations")
    if lists is not None and name in lists:
        return list(lists[name].parameters(recurse=False))
    found = (module._parameters.get(f"{name}{end}") for end in MADE_OF)
    return [parameter for parameter in found if parameter is not None]


def weight_beside_forward(module: torch.nn.Module, name: str = "weight") -> torch.Tensor:
    """Return a module's weight for who looks on: what computes it does no step of its own, as spectral norm would."""
    lists: Any = module._modules.get("parametrizations")
    computing = list(lists[name].modules()) if lists is not None and name in lists else []
    # Not ``eval()``, which a user's class may have made do more.
    modes = [each.training for each in computing]
    for each in computing:
        each.training = False
    try:
        found: torch.Tensor = getattr(module, name)
    finally:
        for each, training in zip(computing, modes, strict=True):
            each.training = training
    return found


def take_place(new: torch.nn.Parameter, old: torch.Tensor) -> bool:
    """Make the Python object ``old`` be what ``new`` is, so that whatever holds ``old`` holds the new weight.

    ``new`` gets gradient, hooks and users' attributes in any case.

    Returns:
        False where torch cannot swap the two, because a weak reference or an autograd graph refers to ``old``; the
        caller then has to replace the reference itself.
    """
    new.grad = old.grad
    new._backward_hooks = old._backward_hooks
    new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    own: Any = getattr(type(old), "OWN_ATTRIBUTES", ())
    # Trainers mark parameters by attributes of their own, and look for the marks later.
    vars(new).update((name, value) for name, value in vars(old).items() if name not in own)
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:
        return False
    return True


def exported(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight, or an optimizer's master of one, as a state dict holds it: same memory, without a graph."""
    local = local_tensor(weight)
    return local.exported_as(weight) if isinstance(local, Weight) else weight.detach()


def is_raw(tensor: object) -> bool:
    """Return whether a tensor is codes without their scales; a Float8Tensor has the dtype that it stands for."""
    return isinstance(tensor, torch.Tensor) and tensor.dtype in RAW


def is_of_tensors(weight: torch.Tensor) -> bool:
    """Return whether a weight is a tensor of other tensors, as other libraries' quantized weights are."""
    return (
        hasattr(type(weight), "__tensor_flatten__")
        and not isinstance(weight, Weight)
        and not is_dtensor(weight)
    )


def check_assigned(fqn: str, name: str, weight: object) -> None:
    """Check that what is assigned in a converted weight's place holds values.

    Raises:
        Float8ConfigError: it is codes without their scales, or another library quantized it.
    """
    kind = type(weight)
    # torch's own stand for values, such as those of a collective that has not ended.
    ours = isinstance(weight, Float8Tensor) or kind.__module__.startswith("torch.")
    if is_raw(weight):
        what = f"of {weight.dtype}"  # type: ignore[attr-defined]
    elif isinstance(weight, torch.Tensor) and is_of_tensors(weight) and not ours:
        what = f"a {kind.__module__}.{kind.__name__}, which another library quantized"
    else:
        return
    raise Float8ConfigError(
        f"{fqn}.{name}: what is assigned to it is {what}, and a converted module casts values in high precision "
        "itself; call f8sub.convert_from_float8(model) before another library quantizes it"
    )


def check_not_raw(fqn: str, values: Mapping[str, object]) -> None:
    """Check that no value of a state dict is codes, of float8 or of integers, which torch would take as numbers.

    Args:
        fqn: of the module that would take them.
        values: by the names of its parameters.

    Raises:
        Float8ConfigError: one is.
    """
    for name, value in values.items():
        if is_raw(value):
            raise Float8ConfigError(
                f"{fqn}.{name}: the state dict has {value.dtype} for it, codes that are no values without their "  # type: ignore[attr-defined]
                "scales; f8sub.load_float8(model, folder) reads codes and scales of a checkpoint"
            )


def written_raw(fqn: str, dtype: torch.dtype) -> Float8ConfigError:
    """Return the error for a layer's weight that codes of ``dtype`` are written to, or were."""
    return Float8ConfigError(
        f"{fqn}: its weight gets {dtype}, codes that are no values without their scales. Write values in high "
        "precision, codes times their scales; f8sub.load_float8(model, folder) reads both from a checkpoint"
    )


def casting(fqn: str, fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return ``fn`` for ``nn.Module._apply``, with an error where it would turn values into float8 without scales.

    torch's cast has no scale: it is silent about what lies beyond the largest code, and from 2.13 on cuts it off.
    """

    def checked(tensor: torch.Tensor) -> torch.Tensor:
        made = fn(tensor)
        if is_raw(made) and not is_raw(tensor):
            raise Float8ConfigError(
                f"{fqn}: its parameters were to become {made.dtype}, by a cast without scales. A converted layer keeps "
                "them in high precision and casts codes itself; f8sub.save_float8 saves codes, and f8sub.load_float8 "
                "reads them"
            )
        return made

    return checked
