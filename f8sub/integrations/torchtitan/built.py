"""Has torchtitan's config of a model build it in float8, in 0.3 and after."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module, ModuleList

from f8sub.diagnostics.report import conversion_report
from f8sub.errors import Float8ConfigError
from f8sub.integrations.torchtitan.experts import register_grouped_experts
from f8sub.integrations.torchtitan.hooks import attach
from f8sub.integrations.torchtitan.options import NOT_KNOWN, JobTokens, Options, convert, tokens_of
from f8sub.linear.float8_linear import Float8Linear

__all__ = ["in_float8", "like", "then"]

_HOOKS = "_register_optimizer_hooks"
"""What torchtitan after 0.3 calls of a model's class when the optimizers are built; in 0.3 a ModelSpec has it."""

logger = logging.getLogger("torchtitan.f8sub")
"""Below torchtitan's own, wherever that sets a level or a handler: the root in 0.3, its package after."""


def like(option: dataclasses.Field[Any]) -> Any:
    """Return a field of another dataclass with the same default."""
    if option.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=option.default_factory)
    return dataclasses.field(default=option.default)


def in_float8(model_config: Any, options: Options, tokens: JobTokens = NOT_KNOWN) -> Any:
    """Have ``model_config`` build its model in float8, in place; one that does so already takes the new options.

    The layers are converted when the model is built, all together, by ``f8sub.convert_to_float8``: the config tree
    stays as it is, so that whatever else reads it, shards by it or converts it goes on as without float8.

    Args:
        model_config: a model's.
        options: what was asked for.
        tokens: ``tokens_of`` the job; none where the config is to learn it by ``update_from_config``.
    """
    if "float8" in vars(type(model_config)):
        # Take off what an earlier call put on; else the model would be converted twice.
        model_config.__class__ = type(model_config).__base__
    cls, of_job = type(model_config), {"tokens": tokens}

    def update_from_config(self: Any, *, config: Any, **more: Any) -> None:
        cls.update_from_config(self, config=config, **more)
        # Others than a trainer, such as a generator, have no batch.
        if hasattr(config, "training"):
            of_job["tokens"] = tokens_of(config.training, config.parallelism)

    learning = {"update_from_config": update_from_config} if hasattr(cls, "update_from_config") else {}
    then(
        model_config,
        lambda model: _converted(model, options, of_job["tokens"]),
        learning,
        float8=options,
    )
    return model_config


def then(
    config: Any, after: Callable[[Any], Any], methods: Mapping[str, Callable[..., Any]] = {}, **members: Any
) -> None:
    """Have ``config.build`` return ``after(what it built)``; with methods, and members that ``to_dict`` shows.

    In place, by a class of the same layout: torchtitan 0.3's trainer takes the model's config before it applies
    overrides, and builds the one it took.
    """
    cls = type(config)

    def build(self: Any, **kwargs: Any) -> Any:
        # The config's own build first: conversion needs the built modules.
        return after(cls.build(self, **kwargs))

    def to_dict(self: Any) -> dict[str, Any]:
        return {**cls.to_dict(self), **{name: value.to_dict() for name, value in members.items()}}

    # No slots of its own: only a class of the same layout may replace an instance's class.
    names = {"__slots__": (), "__module__": cls.__module__, "__qualname__": f"Float8{cls.__qualname__}"}
    config.__class__ = type(
        f"Float8{cls.__name__}",
        (cls,),
        {**names, "build": build, "to_dict": to_dict, **methods, **members},
    )


def _converted(model: Any, options: Options, tokens: JobTokens) -> Any:
    register_grouped_experts()
    convert(model, options, _convertible(model), tokens)
    for module in model.modules():
        cls: Any = type(module)
        # torchtitan asks every module of a model for its protocol, such as how to initialize: states of ours, too.
        if cls.__module__.startswith("f8sub.") and not issubclass(cls, Module):
            module.__class__ = _with_protocol(cls)
    logger.info(f"f8sub: {conversion_report(model).summary}")
    if options.precompute and hasattr(type(model), _HOOKS):
        _attach_when_optimizers_are_built(model)
    return model


def _convertible(model: torch.nn.Module) -> Mapping[type[Any], Mapping[str, Any]]:
    """Return classes of torchtitan's linear layers that convert, and what their float8 classes have besides.

    In 0.3 a layer's product is nn.Linear's forward, and LoRA's classes call that of the class they extend. After 0.3 it
    is ``Linear._linear``, which the forward of tensor-parallel classes calls between its collectives; a class that has
    one of its own multiplies otherwise.
    """
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    product = getattr(Linear, "_linear", None)
    if product is None:
        return {type(each): {} for each in linears if type(each) is Linear or hasattr(each, "lora_a")}
    return {type(each): {"_linear": _linear} for each in linears if type(each)._linear is product}


def _linear(
    layer: Float8Linear, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Run ``Linear._linear`` in float8: the layer knows its weight and its bias.

    Raises:
        Float8ConfigError: the caller adds a bias other than the layer's, as tensor parallelism does that cuts x.
    """
    if bias is not layer.bias:
        raise Float8ConfigError(
            f"{layer._f8sub.fqn}: its bias is one part of a sum over tensor-parallel ranks, which f8sub's layer would "
            "add as a whole; name the layer in filter_fqns"
        )
    return Float8Linear.forward(layer, input)


def _attach_when_optimizers_are_built(model: Any) -> None:
    """Have the model's class attach the scales, after what it does by itself; copies for pipelines keep the class."""
    cls = type(model)

    def hooks(_: Any, optimizers: Any, model_parts: Any, parallelism: Any) -> None:
        getattr(cls, _HOOKS)(optimizers, model_parts, parallelism)
        attach(optimizers, model_parts, parallelism)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    # A class of this model's own, because torchtitan calls the hook on the class.
    model.__class__ = type(cls.__name__, (cls,), {**names, _HOOKS: classmethod(hooks)})


@functools.cache
def _with_protocol(cls: Any) -> Any:
    """Return a class that has torchtitan's protocol of modules besides."""
    protocol = ModuleList if issubclass(cls, torch.nn.ModuleList) else Module
    return type(
        cls.__name__, (cls, protocol), {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )
