"""Float8Experts: a module of experts whose grouped products run in float8; made by class swap, as Float8Linear is."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from f8sub.errors import Float8ConfigError, Float8Warning
from f8sub.experts import adapters
from f8sub.experts.adapters import adapters_apart
from f8sub.experts.grouped_linear import (
    GroupedCall,
    NeededTokens,
    grouped_linear,
    local_part,
    rowwise_of_experts,
    running,
)
from f8sub.experts.seams import AUTO, Seam
from f8sub.formats import Float8Format
from f8sub.kernels.grouped.operands import ExpertWeights, stored_format
from f8sub.linear.converted import ConvertedModule, LayerState
from f8sub.linear.float8_linear import sources_of
from f8sub.weights.conversion import LayerGuest
from f8sub.weights.weight import own_parameter


class ExpertsState(LayerState):
    """Holds what f8sub knows of a module of experts.

    Attributes:
        seam: where its class multiplies.
        needed: what its first forward is compared with; None where the conversion knew all that decides, or was asked
            for.
    """

    __slots__ = ("needed", "seam")

    seam: Seam
    needed: NeededTokens | None

    @override
    def format_of(self, module: torch.nn.Module, name: str) -> Float8Format | None:
        """The codes' format of a weight as it is stored, all experts' rows as one matrix; None in high precision."""
        format = self.plan.recipe.fprop.b
        if format is None:
            return None
        rows = own_parameter(module, name).shape[1]
        return stored_format(format, rows, self.weights[name])

    def rowwise(self, module: torch.nn.Module, name: str, dtype: torch.dtype) -> ExpertWeights:
        """The codes of this rank's experts that fprop in ``dtype`` reads of a weight, which is gathered."""
        format = self.plan.recipe.fprop.b
        if format is None:
            raise RuntimeError(f"{self.fqn}.{name} is read in high precision, so it has no codes")
        sources = sources_of(module, self.plan.recipe, name)
        call = GroupedCall(self.plan, dtype, self.weights[name], sources)
        return rowwise_of_experts(local_part(own_parameter(module, name)), format, call)

    @override
    def is_gathered(self, module: torch.nn.Module, name: str) -> bool:
        """Return whether FSDP2 gathers a weight as float8: no tile of it reaches over experts."""
        every_gemm_reads_codes = None not in self.plan.recipe.formats("w")
        return self.float8_all_gather and every_gemm_reads_codes and self.format_of(module, name) is not None

    @override
    def how(self, module: torch.nn.Module) -> str:
        """Return also how many tokens it needs, where the conversion did not know how many there are."""
        how = super().how(module)
        return how if self.needed is None or self.needed.is_known else f"{how}, {self.needed}"

    @override
    def enter_weights(self, module: torch.nn.Module) -> None:
        """Enter the weights, and the module among those that weights are asked for."""
        adapters.enter(module)
        super().enter_weights(module)


class Float8Experts(ConvertedModule):
    """A converted module of experts; this class stands before the module's own, see ``float8_class``."""

    _f8sub: ExpertsState

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        seam = self._f8sub.seam
        own = super().forward if seam.forward is None else functools.partial(seam.forward, self)
        if "parametrizations" not in self._modules:
            return _run(self, own, args, kwargs)
        with adapters_apart(self):
            return _run(self, own, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class has no name to be found by; that of what was converted has.
        return _new_module, (plain_class(self),), self.__getstate__()  # type: ignore[no-untyped-call]


class _ByMethod(Float8Experts):
    """One whose own class multiplies by a method ``_grouped_mm``, as torchtitan's do."""

    def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        # torchtitan hands the weight over as ``torch._grouped_mm`` takes it, (E, K, N).
        return grouped_linear(A, B_t, offs, transposed=True)


def _run(module: Float8Experts, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with running(module) as call:
        y = forward(*args, **kwargs)
    if not call.multiplied and not any(map(_is_empty, (*args, *kwargs.values()))):
        message = (
            f"{module._f8sub.fqn}: the forward of {plain_class(module).__name__} called no f8sub.grouped_linear, so it "
            "multiplies in high precision though it was converted: call that in place of torch's grouped product, "
            "or leave the module out with skip="
        )
        if module._f8sub.conversion.options["experts"] not in AUTO:
            raise Float8ConfigError(message)
        # Nobody asked for these experts, so the training goes on.
        warnings.warn(message, Float8Warning, stacklevel=2)
    return y


def _is_empty(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and given.numel() == 0


_made: dict[type[torch.nn.Module], type[Float8Experts]] = {}


def float8_class(cls: type[torch.nn.Module]) -> type[Float8Experts]:
    """The class that experts of ``cls`` turn into."""
    if cls not in _made:
        ours = _ByMethod if callable(getattr(cls, "_grouped_mm", None)) else Float8Experts
        _made[cls] = type(f"Float8{cls.__name__}", (ours, cls), {"__module__": cls.__module__})
    return _made[cls]


def plain_class(module: Float8Experts) -> type[torch.nn.Module]:
    """The class that experts had before they were converted; ``fully_shard`` may have put its own before it."""
    cls = next(cls for cls in type(module).__mro__ if cls in _made.values())
    return next(plain for plain, made in _made.items() if made is cls)


def revert_experts(module: Float8Experts) -> None:
    """Give a module of experts its class back; its weights are plain parameters already."""
    adapters.leave(module)
    module._f8sub.revert(module, plain_class(module))


def _new_module(cls: type[torch.nn.Module]) -> Float8Experts:
    made = float8_class(cls)
    return made.__new__(made)


class StoredTransposed(LayerGuest):
    """A guest that has all ranks agree on which weights are stored transposed."""

    @override
    def alike(self, layer: torch.nn.Module) -> dict[str, str]:
        return {"stored transposed": str(layer._f8sub.weights)} if isinstance(layer, Float8Experts) else {}
