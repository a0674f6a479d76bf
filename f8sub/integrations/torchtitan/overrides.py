"""Registers the overrides that torchtitan's command line knows by name, in 0.3 and after."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

from torchtitan.config.override import override
from torchtitan.protocols.model import BaseModel

from f8sub.integrations.torchtitan.built import in_float8, then
from f8sub.integrations.torchtitan.hooks import attach
from f8sub.integrations.torchtitan.options import Options, known

if find_spec("torchtitan.components.optim"):  # after 0.3
    from torchtitan.components.optim import OptimizersContainer
else:
    from torchtitan.components.optimizer import OptimizersContainer

__all__ = ["float8", "precompute_scales"]

Function = TypeVar("Function", bound=Callable[..., Any])


def _of_titan(function: Function) -> Function:
    """Have torchtitan know an override by the module that users name: it goes by ``__module__``."""
    function.__module__ = "f8sub.titan"
    return function


@override(target=BaseModel.Config, description="f8sub: linear layers in float8")
@_of_titan
def float8(config: BaseModel.Config, **options: Any) -> BaseModel.Config:
    """Convert a model in an override; ``options`` are those of ``Float8Converter.Config``."""
    return in_float8(config, Options(**known(options)))


@override(target=OptimizersContainer.Config, description="f8sub: scales after each step")
@_of_titan
def precompute_scales(config: OptimizersContainer.Config) -> OptimizersContainer.Config:
    """Compute scales, and check converted weights, from when the optimizers are built; an override.

    Without it weights are checked at the first forward, and scales are computed from the first optimizer step on. After
    0.3 a converted model does all of it by itself.
    """

    def attached(optimizers: OptimizersContainer) -> OptimizersContainer:
        attach(optimizers, optimizers.model_parts)
        return optimizers

    then(config, attached)
    return config
