"""What features convert besides linear layers."""

from collections.abc import Callable

import torch

from f8sub.recipe import Recipe
from f8sub.weights.conversion import Conversion


class Converter:
    """How a feature converts modules of one kind.

    A converted module has ``converted``, ``fqn``, ``plan`` with its recipe, ``how`` for reports, and what
    ``WeightRecord.module`` asks for.

    Attributes:
        option: of ``convert_to_float8``, which turns it on.
    """

    option: str

    def takes(self, module: torch.nn.Module) -> bool:
        """Whether a module, converted or not, is of the kind."""
        raise NotImplementedError

    def why_not(self, module: torch.nn.Module) -> str | None:
        """Why it cannot be converted; None where it can."""
        raise NotImplementedError

    def planned(
        self, module: torch.nn.Module, fqn: str, recipe: Recipe, backend: str, gathered: bool
    ) -> Callable[[Conversion], None]:
        """What converts the module, and enters its weights in the conversion; changes nothing before that is called.

        Raises:
            Float8ConfigError: the recipe or the backend cannot be.
        """
        raise NotImplementedError

    def revert(self, module: torch.nn.Module) -> None:
        """Make the module what it was; its weights are plain parameters already."""
        raise NotImplementedError


converters: list[Converter] = []
