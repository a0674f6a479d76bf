"""Scales after each optimizer step, over all parts of the model; of any version of torchtitan."""

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from f8sub.convert.checks import is_converted
from f8sub.delayed.state import ScalingState, learn_scales
from f8sub.errors import Float8ConfigError
from f8sub.integrations.torchtitan.graphs import launch_next
from f8sub.linear.float8_linear import Float8Linear
from f8sub.torch_compat import fsdp_params, is_dtensor, module_of
from f8sub.weights.layout import sharded_dims
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.precompute_scales import register_precompute_hook
from f8sub.weights.weight import local_tensor

PRECOMPUTE = "float8_precompute_scales"
"""Attribute of a converted model: whether scales are wanted after each step. Copies for pipeline stages keep it."""

_attached: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def attach(
    optimizers: torch.optim.Optimizer, model_parts: Sequence[torch.nn.Module], parallel_dims: Any = None
) -> None:
    """Have the scales of all ``model_parts`` made after every step of torchtitan's container of optimizers; once.

    The signature is that of ``ModelSpec.post_optimizer_build_fn``: the parts are sharded by now, and no step is taken.

    Raises:
        Float8ConfigError: no part was converted, or what ``check_weights`` and ``check_compiled`` raise.
    """
    if optimizers in _attached:
        return
    if not any(hasattr(part, PRECOMPUTE) for part in model_parts):
        raise Float8ConfigError(
            "scales are to be precomputed and the model has no float8 layers: convert it too, with the override "
            "f8sub.titan.float8, or by what f8sub.titan has in code"
        )
    check_weights(model_parts)
    check_compiled(model_parts)
    register_precompute_hook(optimizers, model_parts)
    states = [module for part in model_parts for module in part.modules() if isinstance(module, ScalingState)]
    if states:
        _compile_before_capture(optimizers, states)
    _attached.add(optimizers)


def _compile_before_capture(optimizers: torch.optim.Optimizer, states: Sequence[ScalingState]) -> None:
    """Have the second step launched, for which blocks with amax histories are compiled once more.

    From the first step on all of their scales are made. torchtitan captures the second step otherwise.
    """

    def after_first_step(*step: Any) -> None:
        handle.remove()
        learn_scales(states)
        launch_next()

    handle = optimizers.register_step_post_hook(after_first_step)


def check_at_first_forward(model: torch.nn.Module) -> None:
    """Have ``check_compiled`` look at a converted model, and at each copy for a pipeline, when it is first called.

    The check across ranks looks at the weights then. Where ``attach`` is called earlier, both are looked at earlier.
    """
    model.register_forward_pre_hook(_check_compiled_once)


def _check_compiled_once(model: torch.nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    check_compiled([model])
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _check_compiled_once:
            del model._forward_pre_hooks[key]


def check_weights(model_parts: Sequence[torch.nn.Module]) -> None:
    """That FSDP2 will gather every weight as it was converted to.

    Raises:
        Float8ConfigError: names the layers whose weight is not f8sub's any more.
    """
    weights = {
        fqn if name == "weight" else f"{fqn}.{name}": (module, name)
        for part in model_parts
        for fqn, module in part.named_modules()
        if is_converted(module)
        for name in module.converted.names_of(module)
    }
    lost = {}
    for fqn, (module, name) in weights.items():
        parameter = module._parameters.get(name)
        local = None if parameter is None else local_tensor(parameter)
        gathered = module.converted.record_of(module, name).gathered
        if not (isinstance(local, MasterWeight) and (hasattr(local, "fsdp_pre_all_gather") or not gathered)):
            lost[fqn] = type(local).__name__
    if lost:
        listed = ", ".join(f"{fqn} ({kind})" for fqn, kind in lost.items())
        raise Float8ConfigError(
            f"{len(lost)} of {len(weights)} converted weights are f8sub's no more and would be gathered in high "
            f"precision: {listed}. Something between conversion and fully_shard put another tensor in their place: "
            "copy into weights, do not assign them"
        )


def check_compiled(model_parts: Sequence[torch.nn.Module]) -> None:
    """That no tensor-parallel weight with amax histories is gathered as float8 in a compiled block.

    Raises:
        Float8ConfigError: names the first of them; the first forward would fail, in dynamo's words.
    """
    layers = {
        layer: f"{fqn}.{name}"
        for part in model_parts
        for fqn, block in part.named_modules()
        if _is_compiled(block)
        for name, layer in block.named_modules()
        if isinstance(layer, Float8Linear) and layer.float8_all_gather and _is_cut_twice(layer)
        if layer.plan.recipe.scaling is not None
    }
    plain = _gathered_as_local(layers)
    found = [fqn for layer, fqn in layers.items() if layer not in plain]
    if found:
        raise Float8ConfigError(
            f"{found[0]} and {len(found) - 1} more are sharded by tensor parallelism, gathered as float8 by FSDP2 and "
            "scaled by amax histories, which torch.compile cannot trace together, and torchtitan compiles whole blocks "
            "or nothing. Take a recipe without delayed scaling, leave out one of --compile.enable, "
            "tensor_parallel_degree and enable_fsdp_float8_all_gather, or take spmd_types for spmd_backend"
        )


def _is_cut_twice(layer: Float8Linear) -> bool:
    weight: Any = layer._parameters["weight"]
    return is_dtensor(weight) and len(sharded_dims(weight)) > 1


@functools.cache
def attach_at_first_step() -> None:
    """Attach to torchtitan's optimizers before their first step, where neither config nor override did it before."""
    register_optimizer_step_pre_hook(_attach_to_container)


def _attach_to_container(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """The container is the one optimizer that knows the parts of the model; it steps those of each part."""
    parts = getattr(optimizer, "model_parts", ())
    if any(getattr(part, PRECOMPUTE, False) for part in parts):
        attach(optimizer, parts)


def _is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` was called, or this is what ``torch.compile(module)`` returned."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _gathered_as_local(layers: Iterable[torch.nn.Module]) -> set[torch.nn.Module]:
    """Those of ``layers`` whose DTensor parameters FSDP2 puts together as plain tensors of spmd_types' kind.

    From torch 2.14 on; what is a DTensor before it is sharded is a DTensor after it is gathered.
    """
    local = {module_of(p) for _, p in fsdp_params() if getattr(p, "is_spmd_types", False)}
    return local.intersection(layers)
