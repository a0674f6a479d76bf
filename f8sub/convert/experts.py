"""Experts of mixtures in a conversion, by its option ``experts``: which are converted, to what, and back."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from f8sub.convert.checks import refusal_of
from f8sub.convert.primary_weights import refuse_delayed
from f8sub.convert.selection import ALREADY, Selection, experts_of, why_not_experts
from f8sub.estimator.experts import ExpertGain, Gains, why_left
from f8sub.experts.grouped_linear import NeededTokens
from f8sub.experts.module import ExpertsState, float8_class
from f8sub.experts.seams import AUTO, seam_of
from f8sub.kernels.gemm.select import FAST_OF_GROUPS, Plan
from f8sub.recipe import Recipe
from f8sub.weights.conversion import Conversion
from f8sub.weights.weight import is_converted

ROOT = "(root)"
"""What errors call the model itself among its modules."""


class ExpertsChoice:
    """Decides which modules of experts of a model are converted.

    Args:
        modules: all of the model, by name.
        options: ``experts``, ``tokens`` and ``primary_weights`` of ``convert_to_float8``; ``gathered``: whether FSDP2
            is taken to gather weights as float8 data; ``exchanged``: whether tokens travel to experts.
        backend: as ``convert_to_float8`` takes it.
    """

    def __init__(
        self, modules: Mapping[str, torch.nn.Module], options: Mapping[str, Any], backend: str = "auto"
    ) -> None:
        self._modules, self._options, self._backend = modules, options, backend
        self._needs: dict[ExpertGain, NeededTokens] = {}

    @functools.cached_property
    def _gains(self) -> Gains:
        return Gains.of_options(self._options)

    def reasons(self, selection: Selection) -> dict[str, str | None]:
        """Return ``Selection.reasons`` of all modules of experts."""
        modules, experts = experts_of(self._modules), self._options["experts"]
        if experts in AUTO:
            return {fqn: self._why_not(module, fqn, selection) for fqn, module in modules.items()}
        for fqn, module in modules.items():
            if experts and not is_converted(module) and (recipe := selection.recipes.of(fqn)) is not None:
                self._check_past(fqn, recipe)
        return selection.reasons_of_experts(self._modules, experts)

    def _why_not(self, module: torch.nn.Module, fqn: str, selection: Selection) -> str | None:
        if is_converted(module):
            return ALREADY
        recipe = selection.recipes.of(fqn)
        # First what costs nothing to know; a filter function may take linear layers alone.
        reason = why_not_experts(module) or (None if recipe is None else self._why_left(fqn, recipe))
        return reason or self._why_not_asked(fqn, selection)

    def _check_past(self, fqn: str, recipe: Recipe) -> None:
        if self._options.get("primary_weights"):
            refuse_delayed(fqn or ROOT, recipe)

    def _why_left(self, fqn: str, recipe: Recipe) -> str | None:
        """Return why ``experts``, one of ``AUTO``, leaves a module that can be converted; None where it does not."""
        if not (gain := self.gain(fqn, recipe)).gains:
            return why_left(gain, self._options["experts"])
        # What was not asked for is no error.
        refused = refusal_of(self._check_past, fqn, recipe) or refusal_of(self.plan, fqn, recipe)
        refused = refused or slow_products(recipe, self._backend)
        return refused and f'experts="{self._options["experts"]}": {refused}'

    def _why_not_asked(self, fqn: str, selection: Selection) -> str | None:
        try:
            return selection.why_not_asked(self._modules[fqn], fqn)
        except AttributeError as error:
            return f'experts="{self._options["experts"]}": filter_fn takes no experts ({error})'

    def gain(self, fqn: str, recipe: Recipe) -> ExpertGain:
        """Predict what float8 gains of a module of experts on this machine's GPU, or on an H200."""
        return self._gains.of_module(self._modules[""], fqn, recipe)

    def plan(self, fqn: str, recipe: Recipe) -> Plan:
        """Return the plan of a module's products.

        Raises:
            Float8ConfigError: the recipe or the backend cannot be.
        """
        module = self._modules[fqn]
        device = next(module.parameters()).device
        # A model is built on meta to be trained on the accelerator.
        if device.type == "meta":
            device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        return Plan.make(recipe, torch.device(device.type), self._backend, grouped=True)

    def _needed(self, fqn: str, recipe: Recipe) -> NeededTokens | None:
        """Return how many tokens per expert a module needs; None where what is known was enough."""
        gain = self.gain(fqn, recipe)
        is_known = gain.tokens is not None
        # Whether FSDP2 gathers the weights is not known before the first forward.
        if gain.enough_gathered is None or (not gain.gathered and (is_known or gain.enough is None)):
            return None
        if gain not in self._needs:
            enough = gain.enough, gain.enough_gathered
            self._needs[gain] = NeededTokens.of(gain.recipe, gain.gpu, *enough, is_known=is_known)
        return self._needs[gain]

    def planned(self, fqn: str, recipe: Recipe, gathered: bool) -> Callable[[Conversion], None]:
        """Return a function that converts a module and enters its weights; nothing changes before that is called.

        Args:
            fqn: the module's name.
            recipe: of its three products.
            gathered: whether FSDP2 gathers its weights as float8, where no tile reaches over experts.

        Raises:
            Float8ConfigError: see ``plan``.
        """
        module, plan = self._modules[fqn], self.plan(fqn, recipe)
        needed = self._needed(fqn, recipe) if self._options["experts"] in AUTO else None

        def convert(conversion: Conversion) -> None:
            if (seam := seam_of(module)) is None:
                raise RuntimeError(f"{fqn}: a {type(module).__name__} is no module of experts that is known")
            state = ExpertsState(plan, fqn or ROOT, conversion, gathered, seam.weights_of(module))
            state.seam, state.needed = seam, needed
            state.convert(module, float8_class(type(module)))

        return convert


def slow_products(recipe: Recipe, backend: str) -> str | None:
    """Return why products of experts gain nothing on this machine's GPU; None where they may, or where none is."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    here = recipe, torch.device(device.type), backend, True
    if refused := refusal_of(Plan.make, *here):
        return refused
    gemms = Plan.make(*here).gemms
    slow = {gemm: name for gemm, name in gemms.items() if name not in (None, *FAST_OF_GROUPS)}
    if not slow:
        return None
    listed = ", ".join(f"{gemm} by {name}" for gemm, name in slow.items())
    return f"this machine has no float8 kernel for products of experts with {recipe.name} ({listed})"
