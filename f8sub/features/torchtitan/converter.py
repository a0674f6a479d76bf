"""torchtitan 0.3: the converter, and configs that build what torchtitan builds and then call f8sub."""

import dataclasses
from collections.abc import Callable
from dataclasses import field
from typing import Any, TypeVar

import torch
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config.override import override
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module, ModuleList
from torchtitan.tools.logging import logger

from f8sub.features.delayed.layers import states_of
from f8sub.features.delayed_state.state import ScalingState
from f8sub.features.report.conversion_report import conversion_report
from f8sub.features.torchtitan.options import Options, convert
from f8sub.features.torchtitan_hooks.scales import attach
from f8sub.linear.float8_linear import Float8Linear

__all__ = ["Float8Converter", "float8", "precompute_scales", "with_float8", "with_precompute_scales"]

Function = TypeVar("Function", bound=Callable[..., Any])


def _like(option: dataclasses.Field[Any]) -> Any:
    """The same default for a field of another dataclass."""
    if option.default_factory is not dataclasses.MISSING:
        return field(default_factory=option.default_factory)
    return field(default=option.default)


class Float8Converter(QuantizationConverter):
    """Convert a model's linear layers to float8: ``model_registry(flavor, converters=[Float8Converter.Config()])``.

    The layers are converted when the model is built, all together, by ``f8sub.convert_to_float8``: the config tree
    stays as it is, so that whatever else reads it, shards by it or converts it goes on as without float8.
    """

    Config = dataclasses.make_dataclass(
        "Config",
        [(f.name, f.type, _like(f)) for f in dataclasses.fields(Options)],
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
        """Have ``model_config`` build its model in float8, in place; one that does so already is asked anew."""
        if "float8" in vars(type(model_config)):
            model_config.__class__ = type(model_config).__base__
        options = self.options
        _then(model_config, lambda model: _converted(model, options), float8=options)
        return model_config


def with_float8(spec: ModelSpec, **options: Any) -> ModelSpec:
    """``spec`` with its model in float8, and the scales made after each optimizer step.

    Args:
        spec: any model's, of any ``model_registry``.
        options: those of ``Float8Converter.Config``.
    """
    converter = Float8Converter(Float8Converter.Config(**options))
    converted = dataclasses.replace(spec, model=converter.convert(spec.model))
    return with_precompute_scales(converted) if converter.options.precompute else converted


def with_precompute_scales(spec: ModelSpec) -> ModelSpec:
    """``spec`` whose optimizers make the scales after each step; what it did after building them is done first."""
    before: Callable[..., None] | None = spec.post_optimizer_build_fn

    def build_fn(
        optimizers: OptimizersContainer, model_parts: list[torch.nn.Module], parallel_dims: Any
    ) -> None:
        if before is not None:
            before(optimizers, model_parts, parallel_dims)
        attach(optimizers, model_parts, parallel_dims)

    return dataclasses.replace(spec, post_optimizer_build_fn=build_fn)


def _of_titan(function: Function) -> Function:
    """Have torchtitan know an override by the module that users name: it goes by ``__module__``."""
    function.__module__ = "f8sub.titan"
    return function


@override(target=BaseModel.Config, description="f8sub: linear layers in float8")
@_of_titan
def float8(config: BaseModel.Config, **options: Any) -> BaseModel.Config:
    """The override that converts a model; ``options`` are those of ``Float8Converter.Config``."""
    return Float8Converter(Float8Converter.Config(**options)).convert(config)


@override(target=OptimizersContainer.Config, description="f8sub: scales after each step")
@_of_titan
def precompute_scales(config: OptimizersContainer.Config) -> OptimizersContainer.Config:
    """The override with which scales are made, and converted weights checked, from when the optimizers are built.

    Without it weights are checked at the first forward, and scales are made from the first optimizer step on.
    """

    def attached(optimizers: OptimizersContainer) -> OptimizersContainer:
        attach(optimizers, optimizers.model_parts)
        return optimizers

    _then(config, attached)
    return config


def _then(config: Any, after: Callable[[Any], Any], **members: Any) -> None:
    """Have ``config.build`` return ``after(what it built)``.

    In place, by a class of the same layout: the trainer takes the model's config before it applies overrides, and
    builds the one it took.
    """
    cls = type(config)

    def build(self: Any, **kwargs: Any) -> Any:
        return after(cls.build(self, **kwargs))

    def to_dict(self: Any) -> dict[str, Any]:
        return {**cls.to_dict(self), **{name: value.to_dict() for name, value in members.items()}}

    names = {"__slots__": (), "__module__": cls.__module__, "__qualname__": f"Float8{cls.__qualname__}"}
    config.__class__ = type(
        f"Float8{cls.__name__}", (cls,), {**names, "build": build, "to_dict": to_dict, **members}
    )


def _converted(model: BaseModel, options: Options) -> BaseModel:
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    # LoRA's classes are made for each class they extend, and call its forward.
    known = {type(module) for module in linears if type(module) is Linear or hasattr(module, "lora_a")}
    convert(model, options, known)
    for layer in model.modules():
        if isinstance(layer, Float8Linear) and states_of(layer):
            layer.scaling_states.__class__ = ModuleList
            for state in states_of(layer):
                state.__class__ = _TitanScalingState
    logger.info(f"f8sub: {conversion_report(model).summary}")
    return model


class _TitanScalingState(ScalingState, Module):
    """Amax histories that keep torchtitan's protocol of modules."""
