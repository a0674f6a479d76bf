"""Turns converted weights in high precision into primary weights in float8, and drops their masters."""

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from f8sub.convert.checks import Chosen
from f8sub.errors import Float8ConfigError, Float8Warning, refuse_other_than_a_module
from f8sub.recipes import DEFAULT
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import is_dtensor, reshard
from f8sub.weights.conversion import Conversion, Guest, LayerGuest
from f8sub.weights.master_weight import Cell, MasterWeight, rowwise_of
from f8sub.weights.primary_weight import Primary, PrimaryWeight, like_sharded
from f8sub.weights.weight import WeightRecord, conversion_of, local_tensor, master_of, take_place

if TYPE_CHECKING:
    from f8sub.recipe import Recipe


class PrimaryWeights(Guest):
    """Knows whether the weights of a conversion become float8, and the optimizers that may step them.

    Attributes:
        chosen: whether they become float8 once an optimizer has their masters.
        taken: cells of the masters that optimizers hold.
    """

    def __init__(self, conversion: Conversion) -> None:
        self.chosen = bool(conversion.options.get("primary_weights"))
        # By cell: FSDP2 re-makes the tensors, and what shares their storage shares the cell.
        self.taken: weakref.WeakSet[Cell] = weakref.WeakSet()

    @override
    def described(self) -> dict[str, str]:
        return {"primary_weights": str(self.chosen)}

    @override
    def before_step(self, optimizer: torch.optim.Optimizer, weights: Sequence[torch.Tensor]) -> None:
        # MasterWeights steps its inner optimizer, whose parameters are masters.
        if not self.chosen or hasattr(optimizer, "takes_masters"):
            return
        for weight in weights:
            local = local_tensor(weight)
            master = master_of(local)
            # No master: the weight was dropped, and no optimizer can step it.
            is_taken = master is None or master.cell in self.taken
            if not is_taken and weight.requires_grad and is_primary(weight):
                raise Float8ConfigError(
                    f"{type(optimizer).__name__} steps a weight of shape {tuple(weight.shape)} that was converted "
                    "with primary_weights=True: wrap it in f8sub.optim.MasterWeights(optimizer), which keeps the "
                    "high-precision master, or convert with primary_weights=False"
                )


def has_primary_weights(conversion: Conversion) -> bool:
    """Return whether the weights of a conversion become float8 once an optimizer has their masters."""
    return conversion.guest(PrimaryWeights).chosen


class PrimaryLayers(LayerGuest):
    """Shows in ``repr`` and reports which weights of a layer are primary."""

    @override
    def deviation(self, layer: torch.nn.Module) -> str | None:
        conversion: Any = conversion_of(layer)
        names = [] if conversion is None else conversion.names_of(layer)
        held = ((n, layer._parameters.get(n)) for n in names)
        primary = [n for n, w in held if w is not None and isinstance(local_tensor(w), PrimaryWeight)]
        if not primary:
            return None
        return "primary weight" if names == ["weight"] else f"primary weights {', '.join(primary)}"


def refuse_without_master(chosen: Sequence[Chosen], options: Mapping[str, Any]) -> None:
    """Refuse primary weights where float8 alone does not do: high-precision GEMMs or gathers, delayed scaling."""
    if not options["primary_weights"]:
        return
    for _, fqn, plan, _, _ in chosen:
        # All layers first: this reason holds for any gather option.
        refuse_delayed(fqn, plan.recipe)
    for _, fqn, plan, gathered, _ in chosen:
        if not gathered:
            raise Float8ConfigError(
                f"primary_weights=True keeps nothing but float8 codes of a weight, and {fqn} with recipe "
                f"{plan.recipe.name!r} reads it in high precision, or float8_all_gather=False gathers it so; choose "
                "one of the two"
            )


def refuse_delayed(fqn: str, recipe: "Recipe") -> None:
    """Raise a Float8ConfigError for a recipe that scales weights by their past, with ``primary_weights=True``."""
    if recipe.delayed is not None:
        raise Float8ConfigError(
            f"primary_weights=True scales weights by their current amax, and {fqn} with recipe {recipe.name!r} scales "
            f"them by their past; choose one of the two, {DEFAULT!r} for instance"
        )


def is_primary(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a float8 primary weight, or becomes one once an optimizer takes its values."""
    local = local_tensor(parameter)
    if isinstance(local, MasterWeight):
        record = local.record
        conversion = None if record is None else record.conversion
        # Experts whose tiles reach over several of them are read in high precision.
        return (
            conversion is not None
            and record is not None
            and record.gathered
            and has_primary_weights(conversion)
        )
    return isinstance(local, PrimaryWeight)


def is_codes_alone(parameter: torch.Tensor) -> bool:
    """Return whether float8 data are all that a parameter has, or will have once its values are there."""
    local = local_tensor(parameter)
    if local.is_meta:  # without values yet, which ``load_float8`` or ``drop_high_precision`` takes to codes
        return is_primary(parameter)
    return isinstance(local, PrimaryWeight) and (local.primary.master is None or local.primary.dropping)


def take_master(parameter: torch.Tensor) -> torch.nn.Parameter:
    """Turn a parameter into float8 and return its high-precision values, exactly, as a parameter of their own.

    Args:
        parameter: one that ``is_primary``; sharded or not. Taken before, its master is returned again.

    Returns:
        float32, sharded as ``parameter`` is; in the same memory where that was float32 already.

    Raises:
        Float8ConfigError: the values were dropped, or something holds on to the parameter as it was.
    """
    # Optimizers step float32 masters, whatever dtype the model has.
    to_codes(parameter, torch.float32)
    local = local_tensor(parameter)
    master = local.primary.master if isinstance(local, PrimaryWeight) else None
    if master is None:
        raise Float8ConfigError(
            f"{local.primary.fqn if isinstance(local, PrimaryWeight) else 'a weight'}: its high-precision values were "
            "dropped, and float8 codes are not a master to train; construct MasterWeights before "
            "drop_high_precision(model)"
        )
    if (
        isinstance(local, PrimaryWeight) and master.dtype != torch.float32
    ):  # which ``restore_high_precision`` made
        master = MasterWeight(master.plain.to(torch.float32))
        master.cell.record, local.primary.master = local.primary.record, master
    if (record := master.record) is not None and (conversion := record.conversion) is not None:
        conversion.guest(PrimaryWeights).taken.add(master.cell)
    taken = torch.nn.Parameter(like_sharded(master, parameter), parameter.requires_grad)
    # FSDP2's, the model's and the optimizer's views are of one weight.
    if isinstance(local, PrimaryWeight):
        local.primary.master = master_of(local_tensor(taken))
    return taken


def drop_high_precision(model: torch.nn.Module) -> None:
    """Keep 1 byte per element, the float8 data, of every primary weight that takes no gradient.

    For inference (``model.requires_grad_(False)`` first) and for frozen parts of a model in training. The
    high-precision values are gone for good, those of a sharded weight once it was gathered the next time: load and
    initialize before. What FSDP2 has gathered is resharded first.

    Raises:
        Float8ConfigError: the model has no layer converted with ``primary_weights=True``.
    """
    refuse_other_than_a_module("drop_high_precision", model)
    reshard(model)  # what is gathered is not the weight whose values are dropped
    records = [record for record in _records(model) if has_primary_weights(_conversion_of(record))]
    if not records:
        raise Float8ConfigError(
            "drop_high_precision found no layer converted with primary_weights=True; the other layers' weights stay in "
            "high precision"
        )
    if all(record.parameter.requires_grad for record in records if record.parameter is not None):
        warnings.warn(
            "drop_high_precision dropped nothing: every weight that was converted with primary_weights=True takes a "
            "gradient; call requires_grad_(False) on what is frozen before it",
            Float8Warning,
            stacklevel=2,
        )
    for record in records:
        weight = record.parameter
        if weight is not None and is_primary(weight) and not weight.requires_grad:
            to_codes(weight, weight.dtype, may_replace=True)
            _drop(record)
    reread_shards(dict.fromkeys(record.module for record in records))


def _records(model: torch.nn.Module) -> list[WeightRecord]:
    """Return the records of a model's converted weights, in its order."""
    found = []
    for module in model.modules():
        if (conversion := conversion_of(module)) is not None:
            found += [conversion.record_of(module, name) for name in conversion.names_of(module)]
    return found


def _conversion_of(record: WeightRecord) -> Conversion:
    conversion: Conversion = record.module._f8sub.conversion
    return conversion


def restore_high_precision(model: torch.nn.Module) -> None:
    """Give weights that are float8 data alone high-precision values again: those that the data stand for.

    So that something can be added to them, as PEFT's ``merge_and_unload`` adds an adapter; the sum is cast again. What
    ``drop_high_precision`` let go of does not come back. It takes 4 or 2 bytes more per element, by the weight's dtype.

    Raises:
        Float8ConfigError: a sharded weight; or no weight of the model is float8 data alone.
    """
    refuse_other_than_a_module("restore_high_precision", model)
    reshard(model)
    dropped = [
        record
        for record in _records(model)
        if record.parameter is not None
        and isinstance(local := local_tensor(record.parameter), PrimaryWeight)
        and (local.master is None or local.primary.dropping)
    ]
    if not dropped:
        raise Float8ConfigError(
            "restore_high_precision found no weight whose values drop_high_precision dropped"
        )
    for record in dropped:
        if is_dtensor(record.parameter):
            raise Float8ConfigError(
                f"{record.fqn}: its weight is sharded; load the adapters into a model that is not, and merge there"
            )
        primary = record.parameter.primary  # type: ignore[union-attr]
        master = MasterWeight.of(primary.values().clone())
        master.cell.record = primary.record
        primary.master, primary.codes = master, None


def _drop(record: WeightRecord) -> None:
    weight, format = record.parameter, record.format
    local = None if weight is None else local_tensor(weight)
    if not isinstance(local, PrimaryWeight) or format is None:
        raise RuntimeError(f"{record.fqn}: a {type(local).__name__} is no primary weight")
    primary = local.primary
    if primary.sharded:
        # What its values are rounded to first, and its scales, are known when it is gathered.
        primary.dropping = True
    elif primary.master is not None:
        rows: Any = primary.master.flatten(0, -2)
        primary.drop(Float8Tensor(rowwise_of(rows, format, primary.dtype), None, primary.dtype))


def reread_shards(layers: Iterable[Any]) -> None:
    """Have FSDP2 look at the local tensors of these layers again, so that none is kept alive that was replaced.

    It looks after a state dict was loaded into the module that owns the parameter: one with nothing in it does, and
    changes nothing.
    """
    for layer in layers:
        conversion = layer._f8sub.conversion
        changes = conversion.changes
        layer.load_state_dict({}, strict=False)
        # Loading counts as a change of all weights on every rank, and this one changed none.
        conversion.changes = changes


def to_codes(parameter: torch.Tensor, master_dtype: torch.dtype, *, may_replace: bool = False) -> None:
    """Turn a master weight into a primary weight whose master has a dtype; one that is primary already stays.

    Raises:
        Float8ConfigError: it is on meta, or something holds on to it as it is and ``may_replace`` is False.
    """
    local = local_tensor(parameter)
    if not isinstance(local, MasterWeight):
        return
    record = local.record
    if record is None or record.conversion is None:
        raise RuntimeError(f"a weight of shape {tuple(local.shape)} that is no layer's cannot become float8")
    if local.is_meta:
        raise Float8ConfigError(
            f"{record.fqn}: a weight on meta has no values to cast; call to_empty and initialize the "
            "model, or load a state dict, before MasterWeights(optimizer) and drop_high_precision(model)"
        )
    sharded = is_dtensor(parameter)
    primary = Primary(record, record.fqn, local.shape, local.dtype, sharded=sharded)
    # Float32 values stay where they are: the optimizer's master is the memory that the model lets go of.
    cell: Cell | None = local.cell if local.dtype == master_dtype else None
    primary.master = MasterWeight(local.plain.to(master_dtype), cell)
    primary.master.cell.record = record
    handle = PrimaryWeight.of(primary, local.device)
    if is_dtensor(parameter):
        # The DTensor stays the same object, which the optimizer and FSDP2 hold.
        parameter._local_tensor = handle
        return
    codes = torch.nn.Parameter(handle, parameter.requires_grad)
    if take_place(codes, parameter):
        return
    if not may_replace:
        raise Float8ConfigError(
            f"{record.fqn}: its weight cannot become float8 because something holds on to it as it is (a "
            "DistributedDataParallel wrapper, a weak reference, an autograd graph that is still alive); construct "
            "MasterWeights(optimizer) right after the optimizer"
        )
    for other in record.conversion:
        if other.parameter is parameter:
            # Torch could not swap the two: put the new one in every module that has the old one.
            setattr(other.module, other.name, codes)
