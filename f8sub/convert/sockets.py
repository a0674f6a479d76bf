"""What features put into a conversion: kinds of modules, layers to leave out by default, a look at the call itself."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from f8sub.recipe import Recipe
from f8sub.weights.conversion import Conversion


class Converter(Protocol):
    """How a feature converts modules of one kind.

    A converted module has ``converted``, ``fqn``, ``plan`` with its recipe, ``how`` for reports, and ``follow``, see
    ``Float8Linear``.
    """

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise Float8ConfigError for values of the feature's options that there are not."""

    def takes(self, module: torch.nn.Module) -> bool:
        """Whether a module, converted or not, is of the kind."""

    def by_options(
        self,
        modules: Mapping[str, torch.nn.Module],
        fqn: str,
        recipe: Recipe | None,
        options: Mapping[str, Any],
    ) -> str | None:
        """Why a caller's options of the feature leave a module as it is; None where they do not.

        Args:
            modules: all of the model, by name.
            fqn: the module's name.
            recipe: that it would get; None where no pattern matches it.
            options: by name.
        """

    def why_not(self, module: torch.nn.Module) -> str | None:
        """Why it cannot be converted; None where it can."""

    def planned(
        self, module: torch.nn.Module, fqn: str, recipe: Recipe, backend: str, gathered: bool
    ) -> Callable[[Conversion], None]:
        """What converts the module, and enters its weights in the conversion; changes nothing before that is called.

        Raises:
            Float8ConfigError: the recipe or the backend cannot be.
        """

    def revert(self, module: torch.nn.Module) -> None:
        """Make the module what it was; its weights are plain parameters already."""


converters: list[Converter] = []

EXPERTS: bool | str = False
"""The default of ``experts``. docs/experts.md says it, docs/api.md by ``python scripts/tables/api.py --write-docs``."""
