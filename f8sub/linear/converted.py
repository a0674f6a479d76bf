"""The common part of converted linear layers and modules of experts: state dicts, copies, devices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from f8sub.errors import Float8ConfigError, jit_error
from f8sub.formats import Float8Format
from f8sub.kernels.gemm.select import Plan
from f8sub.linear import autocast
from f8sub.linear.saved_input import AUTO
from f8sub.weights.conversion import Conversion
from f8sub.weights.master_weight import MasterWeight, master_parameter, reassigned
from f8sub.weights.weight import (
    STATE,
    casting,
    check_assigned,
    check_not_raw,
    exported,
    local_tensor,
    own_parameter,
)


class LayerState:
    """Holds what f8sub knows of a converted module, as its one attribute of f8sub's, ``_f8sub``.

    So users' classes and training code may use any other name, before and after the conversion. Methods are given the
    module: a state that referred to it would be a cycle, and no model would be freed without the garbage collector.

    Attributes:
        plan: the recipe and the backend of each GEMM, where no context asks for another.
        key: the plan's, which is all that compiled code reads of it, and guards on.
        fqn: the module's name in the model that was converted, for errors and reports.
        conversion: the conversion that the weights are of.
        float8_all_gather: whether FSDP2 gathers weights as float8 where they allow it.
        weights: the names of its weights, and whether each is stored transposed, (E, K, N).
        keep_x: what is saved of x for wgrad, one of ``saved_input.KEEP_X``; experts have "auto".
        attends: states of the attention near it, see the note on shared histories in ``convert/attention.py``.
    """

    __slots__ = ("attends", "conversion", "float8_all_gather", "fqn", "keep_x", "key", "plan", "weights")

    key: str

    def __init__(
        self,
        plan: Plan,
        fqn: str,
        conversion: Conversion,
        float8_all_gather: bool,
        weights: Mapping[str, bool],
        keep_x: str = AUTO,
    ) -> None:
        self.plan, self.fqn, self.conversion = plan, fqn, conversion
        self.float8_all_gather, self.weights, self.keep_x = float8_all_gather, weights, keep_x
        self.attends: Sequence[torch.nn.Module] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "plan":
            # Not a property: every eager forward reads the plan, and dynamo would look into one.
            object.__setattr__(self, "key", value.key)

    def convert(self, module: torch.nn.Module, cls: "type[ConvertedModule]") -> None:
        """Turn a module into one of a float8 class with this state, and enter its weights."""
        # Past any ``__setattr__`` of the user's class.
        vars(module)[STATE] = self
        module.__class__ = cls
        self.enter_weights(module)
        for guest in self.conversion.layer_guests:
            guest.entered(module)

    def revert(self, module: torch.nn.Module, cls: type[torch.nn.Module]) -> None:
        """Turn the module, whose weights are plain parameters already, back into one of ``cls``."""
        for guest in self.conversion.layer_guests:
            guest.left(module)
        del vars(module)[STATE]
        module.__class__ = cls

    def format_of(self, module: torch.nn.Module, name: str) -> Float8Format | None:
        """Return the format of a weight's codes as they are stored; None where no product reads any."""
        raise NotImplementedError

    def is_gathered(self, module: torch.nn.Module, name: str) -> bool:
        """Return whether FSDP2 gathers a weight as float8."""
        return self.float8_all_gather

    def enter_weights(self, module: torch.nn.Module) -> None:
        """Enter the weights among those that were converted together."""
        for name in self.weights:
            fqn = f"{self.fqn}.{name}" if self.plan.grouped else self.fqn
            format, gathered = self.format_of(module, name), self.is_gathered(module, name)
            self.conversion.add(module, name, fqn, format, gathered)

    def follow(self, device: torch.device) -> None:
        """Select backends anew where the module came to a device of another type since it was converted.

        Raises:
            Float8ConfigError: the backend asked for does not run there; or ``torch.compile`` traces a first call there.
        """
        if self.plan.device.type == device.type:
            return
        if torch.compiler.is_compiling():
            raise Float8ConfigError(
                f"{self.fqn}: converted for {self.plan.device.type}, and compiled for {device.type}; move the model "
                "with model.to(device), or call it once before it is compiled"
            )
        self.plan = self.plan.on(torch.device(device.type))
        for guest in self.conversion.layer_guests:
            guest.planned(self.conversion, [self.plan])

    def how(self, module: torch.nn.Module) -> str:
        """Return recipe and backend, and what deviates from the defaults."""
        words = [self.plan.recipe.name, self.plan.described]
        if left := [name for name in self.weights if not self.is_gathered(module, name)]:
            which = "" if len(left) == len(self.weights) else f"{', '.join(left)} "
            words.append(f"{which}gathered in high precision")
        deviations = (guest.deviation(module) for guest in self.conversion.layer_guests)
        return ", ".join([*words, *filter(None, deviations)])


class ConvertedModule(torch.nn.Module):
    """A module that multiplies in float8 by weights of its own; what it turns into stands before its own class.

    It has no names but those of nn.Module's own methods, and ``_f8sub``: every other is the user's.
    """

    _f8sub: LayerState

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        made: dict[int, torch.Tensor] = {}

        def apply(tensor: torch.Tensor) -> torch.Tensor:
            made[id(tensor)] = fn(tensor)
            return made[id(tensor)]

        super()._apply(casting(self._f8sub.fqn, apply), recurse)  # type: ignore[no-untyped-call]
        # torch sets ``weight.data``, and the codes of a weight whose memory nobody vouches for are not kept.
        for held in _held(self).values():
            if isinstance(held, MasterWeight):
                held.take_cell(made.get(id(held)))
        weight = own_parameter(self, next(iter(self._f8sub.weights)))
        # Nothing runs on meta. ``to_empty``, which gives the weight memory, comes here again.
        if not weight.is_meta:
            self._f8sub.follow(weight.device)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # Copies and pickles come here, and belong to a conversion of their own.
        self._f8sub.enter_weights(self)
        for name, weight in _held(self).items():
            record = self._f8sub.conversion.record_of(self, name)
            # A pickle has plain parameters, which nothing of f8sub's would follow.
            if type(weight) is torch.nn.Parameter and type(weight.data) is torch.Tensor:
                weight = self._parameters[name] = master_parameter(weight, record)
            local = local_tensor(weight)
            if isinstance(local, MasterWeight):
                local.cell.take(record)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # What guests save is then of the last optimizer step.
        self._f8sub.conversion.settle()
        self._f8sub.conversion.keep_memory(self)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # As the tensors that they stand for: a saved state dict is read without f8sub.
        if not keep_vars:
            for name, weight in _held(self).items():
                destination[f"{prefix}{name}"] = exported(weight)

    @override
    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if name in self._f8sub.weights:
            check_assigned(self._f8sub.fqn, name, param)
        super().register_parameter(name, param)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        conversion = self._f8sub.conversion
        check_not_raw(self._f8sub.fqn, {name: state_dict.get(prefix + name) for name in self._parameters})
        # With ``assign=True`` torch puts other objects in the place of the parameters.
        before = _held(self)
        kinds = {name: type(local_tensor(weight)) for name, weight in before.items()}
        # First: histories that are due would else roll after they were loaded, and count a step twice.
        conversion.settle()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        conversion.loaded()
        conversion.layer_loaded(self, state_dict, prefix)
        for name, kind in kinds.items():
            reassigned(conversion.record_of(self, name), before[name], kind)

    def extra_repr(self) -> str:
        """Add recipe and backend to what its own class shows."""
        return ", ".join(filter(None, (super().extra_repr(), self._f8sub.how(self))))

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        # What torch calls in place of ``forward`` while ``torch.jit.trace`` records.
        raise jit_error(self._f8sub.fqn, "traced")

    def __prepare_scriptable__(self) -> Any:
        # What ``torch.jit.script`` asks each module for.
        raise jit_error(self._f8sub.fqn, "scripted")


def _held(module: ConvertedModule) -> dict[str, torch.nn.Parameter]:
    """The weights that are parameters: neither parametrized nor pruned."""
    found = ((name, module._parameters.get(name)) for name in module._f8sub.weights)
    return {name: weight for name, weight in found if weight is not None}


def plan_of(layer: Any, weight: torch.Tensor) -> Any:
    """The plan of a forward of a converted module that begins now, for its product with ``weight``."""
    return autocast.plan_in_use(layer, weight) if autocast.was_entered else layer._f8sub.plan
