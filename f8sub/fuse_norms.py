"""Layer 6. Which norms of a converted model are read by float8 layers, and which norm each of them is."""

from typing import Any

import torch
from torch import fx
from torch.distributed.fsdp import FSDPModule

from f8sub.feed_forward import FusedFeedForward, Roles
from f8sub.kernels.normed import why_no_kernel
from f8sub.kernels.norms import Norm
from f8sub.kernels.producers import has_one_scale
from f8sub.linear import Float8Linear
from f8sub.norm import FusedNorm, Measuring
from f8sub.traced import Tracer, calls_of, is_call, is_node, result_of

Readers = dict[str, list[tuple[str, torch.nn.Module | None]]]


def norms_or_reasons(
    model: torch.nn.Module, feed_forwards: dict[torch.nn.Module, Roles]
) -> tuple[dict[torch.nn.Module, Measuring], dict[str, str]]:
    """What the norms to fuse are to do, and for every other one with a weight why it is none of them.

    Args:
        model: converted.
        feed_forwards: those that will be fused.
    """
    found: dict[torch.nn.Module, Measuring] = {}
    reasons: dict[str, str] = {}
    for prefix, parent in model.named_modules():
        readers: Readers | str | None = None
        for name, child in parent.named_children():
            if not could_be_norm(child):
                continue
            norm = norm_or_reason(child)
            if isinstance(norm, Norm):
                readers = _readers(parent) if readers is None else readers
                layers = _layers_or_reason(child, readers, name, parent, feed_forwards)
                if not isinstance(layers, str):
                    found[child] = _measuring(norm, layers)
                    continue
                norm = layers
            reasons[f"{prefix}.{name}" if prefix else name] = norm
    return found, reasons


def norm_or_reason(module: torch.nn.Module) -> Norm | str:
    """Which norm a module is, told by what its forward does; else why it is none."""
    if isinstance(module, FSDPModule):
        return "is sharded by fully_shard itself: fuse it before"
    if isinstance(module, torch.nn.RMSNorm) and type(module).forward is torch.nn.RMSNorm.forward:
        if module.eps is None:
            return "has no eps: what torch takes for it depends on the device"
        return Norm(float(module.eps), rounds=False)
    try:
        graph = Tracer().trace(module)
    except Exception as error:  # whatever a forward does with what stands for a tensor
        return f"({type(module).__name__}) cannot be traced: {error}".splitlines()[0]
    eps = _eps(graph)
    return f"({type(module).__name__}) is no RMSNorm" if eps is None else Norm(eps, rounds=True)


def could_be_norm(module: torch.nn.Module) -> bool:
    """Whether its only parameter is the weight of a last dimension, and it has no modules in it."""
    parameters = dict(module.named_parameters())
    return (
        list(parameters) == ["weight"]
        and parameters["weight"].dim() == 1
        and not list(module.children())
        and not isinstance(module, FusedNorm)
    )


def _readers(parent: torch.nn.Module) -> Readers | str:
    """``calls_of``; else why that cannot be told."""
    try:
        return calls_of(parent)
    except Exception as error:  # as above
        return f"is called by a {type(parent).__name__} that cannot be traced: {error}".splitlines()[0]


def _layers_or_reason(
    norm: torch.nn.Module,
    readers: Readers | str,
    name: str,
    parent: torch.nn.Module,
    feed_forwards: dict[torch.nn.Module, Roles],
) -> list[Float8Linear] | str:
    """The float8 layers that read a norm's result, where all that read it are or have such; else why not."""
    if isinstance(readers, str):
        return readers
    if not readers.get(name):
        return f"is not called by its {type(parent).__name__}, or nothing reads it there"
    found: list[Float8Linear] = []
    for reader, module in readers[name]:
        layers = [] if module is None else _layers(module, next(norm.parameters()).shape[0], feed_forwards)
        if not layers:
            what = reader if module is None else f"{reader} ({type(module).__name__})"
            return (
                f"is read by {what}, which does not read it by float8 layers alone that its kernels cast for"
            )
        found += layers
    return found


def _layers(
    module: torch.nn.Module, width: int, feed_forwards: dict[torch.nn.Module, Roles]
) -> list[Float8Linear]:
    """By which float8 layers of its own a module reads its input, told by their number of features.

    None where it has matrices that are in no float8 layer, and may read it too.
    """
    if isinstance(module, FusedFeedForward):
        feed_forwards = {module: module.roles}
    if roles := feed_forwards.get(module):
        candidates = [getattr(module, roles.gate), getattr(module, roles.up)]
    else:
        candidates = list(module.modules())
    for candidate in candidates:
        matrices = [p for p in candidate.parameters(recurse=False) if p.dim() > 1]
        if matrices and not isinstance(candidate, Float8Linear):
            return []
    return [layer for layer in candidates if isinstance(layer, Float8Linear) and _takes_codes(layer, width)]


def _takes_codes(layer: Float8Linear, width: int) -> bool:
    """Whether a kernel normalizes and casts for a layer."""
    rowwise, columnwise = layer.plan.recipe.formats("x")
    return (
        layer.in_features == width and rowwise == columnwise and why_no_kernel((rowwise, columnwise)) is None
    )


def _measuring(norm: Norm, layers: list[Float8Linear]) -> Measuring:
    formats = [layer.plan.recipe.formats("x")[0] for layer in layers if layer.plan.recipe.delayed is None]
    return Measuring.of(norm, any(has_one_scale(format) for format in formats if format is not None))


def _eps(graph: fx.Graph) -> float | None:
    """Of ``weight * (float(x) * rsqrt(mean(float(x)**2) + eps)).to(x.dtype)`` and nothing else; else None."""
    places = [node for node in graph.nodes if node.op == "placeholder"]
    out = result_of(graph)
    if len(places) != 1 or not is_call(out, "mul") or len(out.args) != 2:
        return None
    for weight, rounded in (out.args, out.args[::-1]):
        if is_node(weight) and weight.op == "get_attr" and weight.target == "weight":
            return _eps_of_rounded(rounded, places[0])
    return None


def _eps_of_rounded(rounded: Any, x: fx.Node) -> float | None:
    if not (is_call(rounded, "to") or is_call(rounded, "type_as")) or len(rounded.args) != 2:
        return None
    normalized, as_what = rounded.args
    is_dtype_of_x = is_call(as_what, "getattr", getattr) and as_what.args == (x, "dtype")
    if not (as_what is x or is_dtype_of_x) or not is_call(normalized, "mul") or len(normalized.args) != 2:
        return None
    for wide, rsqrt in (normalized.args, normalized.args[::-1]):
        if is_call(rsqrt, "rsqrt") and _is_float32_of(wide, x):
            return _eps_of_sum(rsqrt.args[0], wide)
    return None


def _eps_of_sum(total: Any, wide: Any) -> float | None:
    if not is_call(total, "add") or len(total.args) != 2:
        return None
    for mean, eps in (total.args, total.args[::-1]):
        if is_call(mean, "mean") and isinstance(eps, float):
            arguments = dict(zip(("input", "dim", "keepdim"), mean.args, strict=False)) | mean.kwargs
            squares = arguments.get("input")
            over = (arguments.get("dim"), arguments.get("keepdim"))
            if is_call(squares, "pow") and squares.args == (wide, 2) and over in ((-1, True), ((-1,), True)):
                return eps
    return None


def _is_float32_of(node: Any, x: fx.Node) -> bool:
    if is_call(node, "float"):
        return bool(node.args == (x,))
    return is_call(node, "to") and node.args == (x, torch.float32)
