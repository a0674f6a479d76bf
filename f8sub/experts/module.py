"""Float8Experts: a module of experts whose grouped products run in float8; made by class swap, as Float8Linear is."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from f8sub.errors import Float8ConfigError, jit_error
from f8sub.experts import adapters
from f8sub.experts.adapters import adapters_apart, own_parameter
from f8sub.experts.grouped_linear import GroupedCall, grouped_linear, local_part, rowwise_of_experts, running
from f8sub.experts.seams import Seam
from f8sub.formats import Float8Format
from f8sub.kernels.gemm.select import Plan
from f8sub.kernels.grouped.operands import ExpertWeights, stored_format
from f8sub.linear.float8_linear import refuse_compiling, sources_of
from f8sub.weights.conversion import Conversion, LayerGuest
from f8sub.weights.master_weight import MasterWeight, reassigned
from f8sub.weights.weight import casting, check_assigned, check_not_raw, exported, local_tensor


class Float8Experts(torch.nn.Module):
    """What every converted module of experts has, before its own class.

    Attributes:
        plan: the recipe and the backend of each product.
        fqn: the module's name in the model that was converted.
        converted: the conversion that the weights are of.
        float8_all_gather: whether FSDP2 gathers weights as float8 where their tiles allow it.
        seam: where its class multiplies.
        weights: the names of its weights, and whether each is stored transposed, (E, K, N).
    """

    plan: Plan
    fqn: str
    converted: Conversion
    float8_all_gather: bool
    seam: Seam
    weights: dict[str, bool]

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        if "parametrizations" not in self._modules:
            return self._run(*args, **kwargs)
        with adapters_apart(self):
            return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with running(self) as call:
            own = super().forward if self.seam.forward is None else functools.partial(self.seam.forward, self)
            y = own(*args, **kwargs)
        if not call.multiplied and not any(map(_is_empty, (*args, *kwargs.values()))):
            raise Float8ConfigError(
                f"{self.fqn}: the forward of {plain_class(self).__name__} called no f8sub.grouped_linear, so it "
                "multiplies in high precision though it was converted: call that in place of torch's grouped product, "
                "or leave the module out with skip="
            )
        return y

    def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        # torchtitan's seam.
        return grouped_linear(A, B_t, offs, transposed=True)

    def format_of(self, name: str) -> Float8Format | None:
        """The codes' format of a weight as it is stored, all experts' rows as one matrix; None in high precision."""
        format = self.plan.recipe.fprop.b
        if format is None:
            return None
        rows = own_parameter(self, name).shape[1]
        return stored_format(format, rows, self.weights[name])

    def rowwise(self, name: str, dtype: torch.dtype) -> ExpertWeights:
        """The codes of this rank's experts that fprop in ``dtype`` reads of a weight, which is gathered."""
        format = self.plan.recipe.fprop.b
        if format is None:
            raise RuntimeError(f"{self.fqn}.{name} is read in high precision, so it has no codes")
        call = GroupedCall(self.plan, dtype, self.weights[name], sources_of(self, self.plan.recipe, name))
        return rowwise_of_experts(local_part(own_parameter(self, name)), format, call)

    def is_gathered(self, name: str) -> bool:
        """Whether FSDP2 gathers a weight as float8: no tile of it reaches over experts."""
        every_gemm_reads_codes = None not in self.plan.recipe.formats("w")
        return self.float8_all_gather and every_gemm_reads_codes and self.format_of(name) is not None

    def enter_weights(self) -> None:
        """Enter the weights among those that were converted together."""
        adapters.enter(self)
        for name in self.weights:
            gathered = self.is_gathered(name)
            self.converted.add(self, name, f"{self.fqn}.{name}", self.format_of(name), gathered)

    def follow(self, device: torch.device) -> None:
        """Select backends anew where the module came to a device of another type."""
        if self.plan.device.type != device.type:
            refuse_compiling(self.fqn, self.plan.device, device)
            self.plan = self.plan.on(torch.device(device.type))

    @property
    def how(self) -> str:
        """Recipe and backend, and what deviates from the defaults."""
        in_high_precision = [name for name in self.weights if not self.is_gathered(name)]
        words = [self.plan.recipe.name, self.plan.described]
        if in_high_precision:
            which = "" if len(in_high_precision) == len(self.weights) else f"{', '.join(in_high_precision)} "
            words.append(f"{which}gathered in high precision")
        return ", ".join(
            [*words, *filter(None, (guest.deviation(self) for guest in self.converted.layer_guests))]
        )

    def extra_repr(self) -> str:
        """That of its class, and ``how``."""
        return ", ".join(filter(None, (super().extra_repr(), self.how)))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Float8Experts":
        super()._apply(casting(self.fqn, fn), recurse)  # type: ignore[no-untyped-call]
        weight = own_parameter(self, next(iter(self.weights)))
        if not weight.is_meta:
            self.follow(weight.device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.converted.settle()
        self.converted.keep_memory(self)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            for name in self._held:
                destination[f"{prefix}{name}"] = exported(self._parameters[name])  # type: ignore[arg-type]

    @property
    def _held(self) -> list[str]:
        """The weights that are parameters: neither parametrized nor pruned."""
        return [name for name in self.weights if self._parameters.get(name) is not None]

    @override
    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if name in self.weights:
            check_assigned(self.fqn, name, param)
        super().register_parameter(name, param)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        check_not_raw(self.fqn, {name: state_dict.get(prefix + name) for name in self._parameters})
        before = {name: self._parameters[name] for name in self._held}
        kinds = {name: type(local_tensor(weight)) for name, weight in before.items() if weight is not None}
        self.converted.settle()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.converted.loaded()
        for guest in self.converted.layer_guests:
            guest.loaded(self, state_dict, prefix)
        for name, kind in kinds.items():
            reassigned(self.converted.record_of(self, name), before[name], kind)  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.enter_weights()
        for name in self._held:
            local = local_tensor(self._parameters[name])  # type: ignore[arg-type]
            if isinstance(local, MasterWeight):
                local.cell.take(self.converted.record_of(self, name))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class has no name to be found by; that of what was converted has.
        return _new_module, (plain_class(self),), self.__getstate__()  # type: ignore[no-untyped-call]

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        raise jit_error(self.fqn, "traced")

    def __prepare_scriptable__(self) -> Any:
        raise jit_error(self.fqn, "scripted")


def _is_empty(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and given.numel() == 0


_made: dict[type[torch.nn.Module], type[Float8Experts]] = {}


def float8_class(cls: type[torch.nn.Module]) -> type[Float8Experts]:
    """The class that experts of ``cls`` turn into."""
    if cls not in _made:
        _made[cls] = type(f"Float8{cls.__name__}", (Float8Experts, cls), {"__module__": cls.__module__})
    return _made[cls]


def plain_class(module: Float8Experts) -> type[torch.nn.Module]:
    """The class that experts had before they were converted; ``fully_shard`` may have put its own before it."""
    cls = next(cls for cls in type(module).__mro__ if cls in _made.values())
    return next(plain for plain, made in _made.items() if made is cls)


def _new_module(cls: type[torch.nn.Module]) -> Float8Experts:
    made = float8_class(cls)
    return made.__new__(made)


class StoredTransposed(LayerGuest):
    """Which weights are stored transposed, as all ranks must have it."""

    @override
    def alike(self, layer: torch.nn.Module) -> dict[str, str]:
        return {"stored transposed": str(layer.weights)} if isinstance(layer, Float8Experts) else {}
