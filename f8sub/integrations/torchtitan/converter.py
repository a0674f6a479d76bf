"""torchtitan 0.3: the converter, and specs whose models are in float8."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec

from f8sub.integrations.torchtitan.built import in_float8, like
from f8sub.integrations.torchtitan.hooks import attach
from f8sub.integrations.torchtitan.options import Options, known

__all__ = ["Float8Converter", "with_float8", "with_precompute_scales"]


class Float8Converter(QuantizationConverter):
    """Convert a model's linear layers to float8: ``model_registry(flavor, converters=[Float8Converter.Config()])``.

    The layers are converted when the model is built, all together, by ``f8sub.convert_to_float8``: the config tree
    stays as it is, so that whatever else reads it, shards by it or converts it goes on as without float8.
    """

    Config = dataclasses.make_dataclass(
        "Config",
        [(f.name, f.type, like(f)) for f in dataclasses.fields(Options)],
        bases=(QuantizationConverter.Config,),
        namespace={
            "__module__": __name__,
            "__qualname__": "Float8Converter.Config",
            "__doc__": Options.__doc__,
        },
        kw_only=True,
        slots=True,
    )

    def __init__(self, config: Any) -> None:
        names = [f.name for f in dataclasses.fields(Options)]
        self.options = Options(**{name: getattr(config, name) for name in names})

    def convert(self, model_config: BaseModel.Config) -> BaseModel.Config:
        """Have ``model_config`` build its model in float8, in place; one that does so already takes the new options."""
        return in_float8(model_config, self.options)


def with_float8(spec: ModelSpec, **options: Any) -> ModelSpec:
    """Return ``spec`` with its model in float8, and the scales computed after each optimizer step.

    After torchtitan 0.3 the function of this name takes what there is in place of specs: a trainer's config, of which
    it returns a changed copy, or a model's config, which it changes.

    Args:
        spec: any model's, of any ``model_registry``.
        options: those of ``Float8Converter.Config``.
    """
    converter = Float8Converter(Float8Converter.Config(**known(options)))
    converted = dataclasses.replace(spec, model=converter.convert(spec.model))
    return with_precompute_scales(converted) if converter.options.precompute else converted


def with_precompute_scales(spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with scales after each optimizer step; what it did after building them is done first."""
    before: Callable[..., None] | None = spec.post_optimizer_build_fn

    def build_fn(
        optimizers: OptimizersContainer, model_parts: list[torch.nn.Module], parallel_dims: Any
    ) -> None:
        if before is not None:
            before(optimizers, model_parts, parallel_dims)
        attach(optimizers, model_parts, parallel_dims)

    return dataclasses.replace(spec, post_optimizer_build_fn=build_fn)
