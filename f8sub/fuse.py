"""Layer 6. fuse_producers: feed-forwards and norms of a converted model, found by what their forward does, fused."""

import fnmatch
import inspect
import operator
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import fx
from torch.distributed.fsdp import FSDPModule

from f8sub.errors import Float8ConfigError
from f8sub.feed_forward import FusedFeedForward, Roles
from f8sub.fuse_norms import could_be_norm, norms_or_reasons
from f8sub.linear import Float8Linear
from f8sub.norm import FusedNorm
from f8sub.saved_input import RECOMPUTE, reencodes
from f8sub.traced import Tracer, is_node, result_of

Model = TypeVar("Model", bound=torch.nn.Module)
Fused = type[FusedFeedForward] | type[FusedNorm]
FUSED = (FusedFeedForward, FusedNorm)

_PRODUCTS = (operator.mul, torch.mul, "mul")
_SILU = (torch.nn.functional.silu,)
_SILU_CLASSES = ("SiLU", "SiLUActivation")
"""torch's module, and that of transformers, by name: transformers need not be installed."""


def fuse_producers(model: Model, modules: str | Sequence[str] = ()) -> Model:
    """Have what float8 layers read cast where it is made, wherever a converted model has it so, in place.

    ``down(silu(gate(x)) * up(x))`` becomes one function: what down's GEMMs read of ``silu(gate) * up``, and what the
    backward GEMMs of gate and up read of its gradients, goes to memory in float8 alone. An RMSNorm before float8 layers
    (those of q, k and v; a feed-forward) leaves it to them to normalize and cast at once; whatever else reads its
    result gets that in high precision.

    The numbers stay those of the modules one after the other, bitwise in eager code; but for the last bits of a norm's
    rstd on a GPU. Names, parameters, state dicts, hooks and the layers themselves stay as they are; what is saved for
    backward is gate, up, the norm's input and codes of its result.

    Call it after ``convert_to_float8`` and before ``fully_shard`` is applied to a feed-forward itself.

    Args:
        model: converted, sharded or not.
        modules: glob patterns over module names; each module that matches has to be such a feed-forward, of float8
            layers, or such a norm. Without any, all that are such are fused, and one has to be.

    Returns:
        ``model`` itself.

    Raises:
        Float8ConfigError: a module that was asked for is none of these, or none is; the message says what each
            candidate is instead.
    """
    patterns = (modules,) if isinstance(modules, str) else tuple(modules)
    found, unfit, others = _feed_forwards(model, patterns)
    norms, refused = norms_or_reasons(model, found)
    if patterns:
        names = {module: fqn for fqn, module in model.named_modules()}
        norms = {module: norm for module, norm in norms.items() if _is_asked(names[module], patterns)}
        refused = {fqn: reason for fqn, reason in refused.items() if _is_asked(fqn, patterns)}
    # Norms alone are not what whoever has feed-forwards asked for.
    none = not found and (bool(unfit) or not norms)
    wrong = {**unfit, **others, **refused} if patterns or none else {}
    if none:
        wrong |= {
            fqn: "is fused already" for fqn, module in model.named_modules() if isinstance(module, FUSED)
        }
    if wrong or none:
        listed = (
            "; ".join(f"{fqn} {reason}" for fqn, reason in wrong.items())
            or "no module with three float8 layers, and no norm"
        )
        raise Float8ConfigError(
            "fuse_producers looks for down(silu(gate(x)) * up(x)) of float8 layers, and for an RMSNorm that such read, "
            f"and found: {listed}. "
            "Call convert_to_float8 first, and name in modules= what is to be fused, or call it on a part of the model"
        )
    for module, roles in found.items():
        module.__class__ = _fused_class(type(module), FusedFeedForward)
        module.roles = roles  # type: ignore[assignment]
    for module, norm in norms.items():
        module.__class__ = _fused_class(type(module), FusedNorm)
        module.measuring = norm  # type: ignore[assignment]
    return model


def _feed_forwards(
    model: torch.nn.Module, patterns: tuple[str, ...]
) -> tuple[dict[torch.nn.Module, Roles], dict[str, str], dict[str, str]]:
    """Those to fuse; why others cannot be; and why what was asked for, or has as many float8 layers, is none."""
    found: dict[torch.nn.Module, Roles] = {}
    unfit: dict[str, str] = {}
    others: dict[str, str] = {}
    for fqn, module in model.named_modules():
        if isinstance(module, FUSED) or could_be_norm(module):
            continue
        if _is_asked(fqn, patterns) if patterns else len(list(_layers(module))) == len(Roles._fields):
            roles = _roles_or_reason(module)
            if isinstance(roles, str):
                others[fqn or "(root)"] = roles
            elif reason := _why_not(module, roles):
                unfit[fqn or "(root)"] = reason
            else:
                found[module] = roles
    return found, unfit, others


def _is_asked(fqn: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(fqn, pattern) for pattern in patterns)


def unfuse(module: torch.nn.Module) -> None:
    """Give a feed-forward or a norm its own forward back; any other module stays as it is."""
    if isinstance(module, FUSED):
        del module.__dict__["roles" if isinstance(module, FusedFeedForward) else "measuring"]
        module.__class__ = type(module).__bases__[1]


def _layers(module: torch.nn.Module) -> Iterator[tuple[str, Float8Linear]]:
    yield from ((name, child) for name, child in module.named_children() if isinstance(child, Float8Linear))


def _roles_or_reason(module: torch.nn.Module) -> Roles | str:
    """Told by what its forward does."""
    if isinstance(module, FSDPModule):
        return "is sharded by fully_shard itself: fuse it before"
    try:
        graph = Tracer().trace(module)
    except Exception as error:  # whatever a forward does with what stands for a tensor
        return f"({type(module).__name__}) cannot be traced: {error}".splitlines()[0]
    roles = _roles(graph, module)
    if roles is None:
        steps = ", ".join(str(node.target) for node in graph.nodes if node.op != "output")
        return f"({type(module).__name__}) does something else: {steps}"
    return roles


def _why_not(module: torch.nn.Module, roles: Roles) -> str | None:
    """Why a feed-forward cannot be fused, told by its layers; None where it can."""
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
    return None


def _roles(graph: fx.Graph, module: torch.nn.Module) -> Roles | None:
    """Which children are gate, up and down, if a graph is ``down(silu(gate(x)) * up(x))`` and nothing else."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    result = result_of(graph)
    places = [node for node in nodes if node.op == "placeholder"]
    if len(nodes) != 6 or len(places) != 1 or not _calls_module(result):
        return None
    product: Any = result.args[0]
    if not is_node(product) or product.target not in _PRODUCTS or len(product.args) != 2:
        return None
    for silu, up in (product.args, product.args[::-1]):
        if not (is_node(silu) and _is_silu(silu, module) and _calls_module(up)):
            continue
        gate: Any = silu.args[0]
        if _calls_module(gate) and gate.args == up.args == (places[0],):
            return Roles(str(gate.target), str(up.target), str(result.target))
    return None


def _calls_module(node: Any) -> bool:
    return is_node(node) and node.op == "call_module" and not node.kwargs and len(node.args) == 1


def _is_silu(node: fx.Node, module: torch.nn.Module) -> bool:
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))).__name__ in _SILU_CLASSES and len(node.args) == 1
    return node.target in _SILU and len(node.args) == 1 and not node.kwargs.get("inplace")


_made: dict[tuple[type[torch.nn.Module], Fused], type[torch.nn.Module]] = {}


def _fused_class(cls: type[torch.nn.Module], fused: Fused) -> type[torch.nn.Module]:
    """The class that modules of ``cls`` turn into: all of ``cls`` but its forward, which is that of ``fused``."""
    if (cls, fused) not in _made:
        members = {"__module__": cls.__module__, "__reduce_ex__": _reduce, "forward": _forward_of(cls, fused)}
        _made[cls, fused] = type(f"Fused{cls.__name__}", (fused, cls), members)
    return _made[cls, fused]


def _forward_of(cls: type[torch.nn.Module], fused: Fused) -> Any:
    """The forward of ``fused`` with the parameters that ``cls``'s has: torchtitan looks for them by name."""
    own = fused.forward
    made: Any = FunctionType(own.__code__, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    made.__signature__ = inspect.signature(cls.forward)
    return made


def _reduce(module: torch.nn.Module, protocol: Any) -> Any:
    """Copies and pickles name the class that was fused: one that was made has no name to be found by."""
    fused, cls = type(module).__bases__
    return _new, (cls, fused), module.__dict__


def _new(cls: type[torch.nn.Module], fused: Fused) -> torch.nn.Module:
    made = _fused_class(cls, fused)
    return made.__new__(made)
