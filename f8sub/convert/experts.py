"""Experts enter ``convert_to_float8`` here, by its option ``experts``."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from typing_extensions import override

from f8sub.convert.checks import refuse_taken_names
from f8sub.convert.class_swap import Converter, converters
from f8sub.convert.filters import why_not_weight
from f8sub.convert.primary_weights import refuse_delayed
from f8sub.estimator.experts import of_module, why_left
from f8sub.experts import adapters
from f8sub.experts.module import Float8Experts, float8_class, plain_class
from f8sub.experts.seams import AUTO_EXPERTS, refuse_unknown_experts, seam_of
from f8sub.formats import MULTIPLE
from f8sub.kernels.gemm.select import Plan
from f8sub.recipe import Recipe
from f8sub.weights.conversion import Conversion


class ExpertsConverter(Converter):
    """Converts modules of experts whose seam is known."""

    @override
    def check(self, options: Mapping[str, Any]) -> None:
        refuse_unknown_experts(options["experts"], options["tokens"])

    @override
    def takes(self, module: torch.nn.Module) -> bool:
        return isinstance(module, Float8Experts) or seam_of(module) is not None

    @override
    def by_options(
        self,
        modules: Mapping[str, torch.nn.Module],
        fqn: str,
        recipe: Recipe | None,
        options: Mapping[str, Any],
    ) -> str | None:
        if not options["experts"]:
            return "pass experts=True to convert"
        if options.get("primary_weights") and recipe is not None:
            refuse_delayed(fqn or "(root)", recipe)
        if options["experts"] != AUTO_EXPERTS or recipe is None or self.why_not(modules[fqn]) is not None:
            return None
        gain = of_module(modules, fqn, recipe, options["tokens"])
        return None if gain.gains else why_left(gain)

    @override
    def why_not(self, module: torch.nn.Module) -> str | None:
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

    @override
    def planned(
        self, module: torch.nn.Module, fqn: str, recipe: Recipe, backend: str, gathered: bool
    ) -> Callable[[Conversion], None]:
        refuse_taken_names(module, fqn, Float8Experts, seams=("_grouped_mm",))
        device = next(module.parameters()).device
        # A model is built on meta to be trained on the accelerator.
        if device.type == "meta":
            device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        plan = Plan.make(recipe, torch.device(device.type), backend, grouped=True)

        def convert(conversion: Conversion) -> None:
            seam = seam_of(module)
            weights = {} if seam is None else seam.weights_of(module)
            own = {"seam": seam, "weights": weights}
            float8_class(type(module))._take(module, plan, fqn, conversion, gathered, **own)

        return convert

    @override
    def revert(self, module: torch.nn.Module) -> None:
        if isinstance(module, Float8Experts):
            adapters.leave(module)
            module._become(plain_class(module))


converters.append(ExpertsConverter())
