"""Layer 6. fuse_producers: feed-forwards of a converted model, found by what their forward does, as one function."""

import fnmatch
import operator
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import fx
from torch.distributed.fsdp import FSDPModule

from f8sub.errors import Float8ConfigError
from f8sub.feed_forward import FusedFeedForward, Roles
from f8sub.linear import Float8Linear
from f8sub.saved_input import RECOMPUTE, reencodes

Model = TypeVar("Model", bound=torch.nn.Module)

_PRODUCTS = (operator.mul, torch.mul, "mul")
_SILU = (torch.nn.functional.silu,)
_SILU_CLASSES = ("SiLU", "SiLUActivation")
"""torch's module, and that of transformers, by name: transformers need not be installed."""


def fuse_producers(model: Model, modules: str | Sequence[str] = ()) -> Model:
    """Turn ``down(silu(gate(x)) * up(x))`` into one function wherever a converted model has it, in place.

    What down's GEMMs read of ``silu(gate) * up``, and what the backward GEMMs of gate and up read of its gradients, is
    cast where it is made then, and goes to memory in float8 alone. The numbers stay those of the layers one after the
    other, bitwise in eager code. Names, parameters, state dicts, hooks and the layers themselves stay as they are; what
    is saved for backward is gate, up and x's codes.

    Call it after ``convert_to_float8`` and before ``fully_shard`` is applied to a feed-forward itself.

    Args:
        model: converted, sharded or not.
        modules: glob patterns over module names; each module that matches has to be such a feed-forward, of float8
            layers. Without any, all that are such are fused, and one has to be.

    Returns:
        ``model`` itself.

    Raises:
        Float8ConfigError: a module that was asked for is no such feed-forward, or none is; the message says what each
            candidate is instead.
    """
    patterns = (modules,) if isinstance(modules, str) else tuple(modules)
    found: dict[torch.nn.Module, Roles] = {}
    reasons: dict[str, str] = {}
    for fqn, module in model.named_modules():
        if isinstance(module, FusedFeedForward):
            reasons[fqn] = "is fused already"
            continue
        asked = any(fnmatch.fnmatchcase(fqn, pattern) for pattern in patterns)
        if asked if patterns else len(list(_layers(module))) == len(Roles._fields):
            roles = _roles_or_reason(module)
            if isinstance(roles, Roles):
                found[module] = roles
            else:
                reasons[fqn or "(root)"] = roles
    wrong = reasons if patterns or not found else {}
    if wrong or not found:
        listed = (
            "; ".join(f"{fqn} {reason}" for fqn, reason in wrong.items())
            or "no module with three float8 layers"
        )
        raise Float8ConfigError(
            f"fuse_producers looks for down(silu(gate(x)) * up(x)) of float8 layers, and found: {listed}. "
            "Call convert_to_float8 first, and name in modules= what is to be fused, or call it on a part of the model"
        )
    for module, roles in found.items():
        module.__class__ = _fused_class(type(module))
        module.roles = roles  # type: ignore[assignment]
    return model


def unfuse(module: torch.nn.Module) -> None:
    """Give a feed-forward its own forward back; any other module stays as it is."""
    if isinstance(module, FusedFeedForward):
        del module.roles
        module.__class__ = type(module).__bases__[1]


def _layers(module: torch.nn.Module) -> Iterator[tuple[str, Float8Linear]]:
    yield from ((name, child) for name, child in module.named_children() if isinstance(child, Float8Linear))


class _Tracer(fx.Tracer):
    """Sees a module's own forward and nothing below it."""

    def is_leaf_module(self, module: torch.nn.Module, module_qualified_name: str) -> bool:
        return True


def _roles_or_reason(module: torch.nn.Module) -> Roles | str:
    if isinstance(module, FSDPModule):
        return "is sharded by fully_shard itself: fuse it before"
    try:
        graph = _Tracer().trace(module)
    except Exception as error:  # whatever a forward does with what stands for a tensor
        return f"({type(module).__name__}) cannot be traced: {error}".splitlines()[0]
    roles = _roles(graph, module)
    if roles is None:
        steps = ", ".join(str(node.target) for node in graph.nodes if node.op != "output")
        return f"({type(module).__name__}) does something else: {steps}"
    layers = [getattr(module, name) for name in roles]
    for name, layer in zip(roles, layers, strict=True):
        if not isinstance(layer, Float8Linear):
            return f"has {name} as {type(layer).__name__}, which is not converted"
        if type(layer).forward is not Float8Linear.forward:
            return f"has {name} as {type(layer).__name__}, whose forward does more than a linear layer's"
        recipe = layer.plan.recipe
        kept = [gemm for gemm in ("fprop", "dgrad", "wgrad") if getattr(recipe, gemm).a is None]
        if kept:
            return (
                f"has {name} with recipe {recipe.name!r}, whose {' and '.join(kept)} reads in high precision what "
                "would not be in memory"
            )
    gate, up, down = layers
    if gate.plan != up.plan:
        return (
            f"has {roles.gate} with recipe {gate.plan.recipe.name!r} and {roles.up} with {up.plan.recipe.name!r}: "
            "give both one recipe and backend"
        )
    if down.keep_x == RECOMPUTE and reencodes(down.plan.recipe):
        return (
            f"has {roles.down} with keep_x={down.keep_x!r}, which re-encodes h's codes; fused, h is made again of gate "
            "and up: give it 'auto'"
        )
    return roles


def _roles(graph: fx.Graph, module: torch.nn.Module) -> Roles | None:
    """Which children are gate, up and down, if a graph is ``down(silu(gate(x)) * up(x))`` and nothing else."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    result: Any = next(node.args[0] for node in graph.nodes if node.op == "output")
    places = [node for node in nodes if node.op == "placeholder"]
    if len(nodes) != 6 or len(places) != 1 or not _calls_module(result):
        return None
    product: Any = result.args[0]
    if not _is_node(product) or product.target not in _PRODUCTS or len(product.args) != 2:
        return None
    for silu, up in (product.args, product.args[::-1]):
        if not (_is_node(silu) and _is_silu(silu, module) and _calls_module(up)):
            continue
        gate: Any = silu.args[0]
        if _calls_module(gate) and gate.args == up.args == (places[0],):
            return Roles(str(gate.target), str(up.target), str(result.target))
    return None


def _calls_module(node: Any) -> bool:
    return _is_node(node) and node.op == "call_module" and not node.kwargs and len(node.args) == 1


def _is_node(node: Any) -> bool:
    return isinstance(node, fx.Node)


def _is_silu(node: fx.Node, module: torch.nn.Module) -> bool:
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))).__name__ in _SILU_CLASSES and len(node.args) == 1
    return node.target in _SILU and len(node.args) == 1 and not node.kwargs.get("inplace")


_made: dict[type[torch.nn.Module], type[FusedFeedForward]] = {}


def _fused_class(cls: type[torch.nn.Module]) -> type[FusedFeedForward]:
    """The class that feed-forwards of ``cls`` turn into: all of ``cls`` but its forward."""
    if cls not in _made:
        members = {"__module__": cls.__module__, "__reduce_ex__": _reduce}
        _made[cls] = type(f"Fused{cls.__name__}", (FusedFeedForward, cls), members)
    return _made[cls]


def _reduce(module: FusedFeedForward, protocol: Any) -> Any:
    """Copies and pickles name the class that was fused: one that was made has no name to be found by."""
    return _new, (type(module).__bases__[1],), module.__dict__


def _new(cls: type[torch.nn.Module]) -> FusedFeedForward:
    fused = _fused_class(cls)
    return fused.__new__(fused)
