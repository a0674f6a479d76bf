"""Experts of mixtures in a conversion, by its option ``experts``: which are converted, to what, and back."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from f8sub.convert.filters import why_not_weight
from f8sub.convert.primary_weights import refuse_delayed
from f8sub.estimator.experts import of_module, why_left
from f8sub.experts import adapters
from f8sub.experts.module import ExpertsState, Float8Experts, float8_class, plain_class
from f8sub.experts.seams import AUTO_EXPERTS, seam_of
from f8sub.formats import MULTIPLE
from f8sub.kernels.gemm.select import Plan
from f8sub.recipe import Recipe
from f8sub.weights.conversion import Conversion


def why_not_by_options(
    modules: Mapping[str, torch.nn.Module],
    fqn: str,
    recipe: Recipe | None,
    options: Mapping[str, Any],
) -> str | None:
    """Return why a caller's options leave a module of experts as it is; None where they do not.

    Args:
        modules: all of the model, by name.
        fqn: the module's name.
        recipe: that it would get; None where no pattern matches it.
        options: ``experts``, ``tokens`` and ``primary_weights`` of ``convert_to_float8``.
    """
    if not options["experts"]:
        return "pass experts=True to convert"
    if options.get("primary_weights") and recipe is not None:
        refuse_delayed(fqn or "(root)", recipe)
    if options["experts"] != AUTO_EXPERTS or recipe is None or why_not_experts(modules[fqn]) is not None:
        return None
    gain = of_module(modules, fqn, recipe, options["tokens"])
    return None if gain.gains else why_left(gain)


def why_not_experts(module: torch.nn.Module) -> str | None:
    """Return why a module of experts cannot be converted; None where it can."""
    # A forward on the instance would hide that of the class it is swapped for.
    if "forward" in vars(module):
        return f"something replaced the forward of this {type(module).__name__}; convert first"
    seam = seam_of(module)
    for name in () if seam is None else seam.weights_of(module):
        weight = module._parameters.get(name)
        if weight is None or weight.dim() != 3:
            return f"{name} is no parameter of three dimensions, one matrix an expert"
        if any(size % MULTIPLE for size in weight.shape[1:]):
            return f"{name} is {tuple(weight.shape)}: the last two have to be multiples of {MULTIPLE}"
        if (reason := why_not_weight(weight, name)) is not None:
            return reason
    return None


def planned_experts(
    module: torch.nn.Module, fqn: str, recipe: Recipe, backend: str, gathered: bool
) -> Callable[[Conversion], None]:
    """Return a function that converts the module and enters its weights; nothing changes before that is called.

    Args:
        module: one whose seam is known.
        fqn: its name in the model.
        recipe: of its three products.
        backend: as ``convert_to_float8`` takes it.
        gathered: whether FSDP2 gathers its weights as float8, where no tile reaches over experts.

    Raises:
        Float8ConfigError: the recipe or the backend cannot be.
    """
    device = next(module.parameters()).device
    # A model is built on meta to be trained on the accelerator.
    if device.type == "meta":
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    plan = Plan.make(recipe, torch.device(device.type), backend, grouped=True)

    def convert(conversion: Conversion) -> None:
        if (seam := seam_of(module)) is None:
            raise RuntimeError(f"{fqn}: a {type(module).__name__} is no module of experts that is known")
        state = ExpertsState(plan, fqn, conversion, gathered, seam.weights_of(module))
        state.seam = seam
        state.convert(module, float8_class(type(module)))

    return convert


def revert_experts(module: Float8Experts) -> None:
    """Give a module of experts its class back; its weights are plain parameters already."""
    adapters.leave(module)
    module._f8sub.revert(module, plain_class(module))
