"""Functions as nodes of the graphs that torch traces, and which results checkpointed functions in them save."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from f8sub.torch_compat import (
    COMPILATION,
    SelectiveCheckpoint,
    call_directly,
    constant_result,
    dispatch_modes,
    require,
    tag_of_checkpoints,
)

Function = TypeVar("Function", bound=Callable[..., Any])

_in_graphs: list[Callable[..., Any]] = []

direct: dict[str, Callable[..., Any]] = {}
"""Functions of operators, by the operators' names."""

at_one_place: dict[str, Callable[[], Callable[..., Any]]] = {}
"""What makes a function for one call in generated code, whose tensors have the same shapes and strides each time.

By the operators' names. The function's results lie as the operator's fake says.
"""


def in_graph(function: Function) -> Function:
    """``function`` as one node of dynamo's graph, once ``enter_graph_functions`` ran; AOT autograd traces what it does.

    ``torch.compiler.allow_in_graph`` without its ``import torch._dynamo``. Takes tensors and constants.
    """
    # Entered in dynamo later, because that imports ``torch._dynamo``.
    _in_graphs.append(function)
    return function


def call_directly_in_graphs(
    operator: str, function: Callable[..., Any], maker: Callable[[], Callable[..., Any]] | None = None
) -> None:
    """Have Inductor's code call an operator's function, once ``enter_graph_functions`` ran; it changes no argument.

    ``maker`` is an entry of ``at_one_place``, where the operator has one.
    """
    direct[operator] = function
    if maker is not None:
        at_one_place[operator] = maker


def function_of_call(operator: str, otherwise: Callable[..., Any], of: str | None) -> Callable[..., Any]:
    """Return what one call in Inductor's code calls; that looks for this function.

    Args:
        operator: its name.
        otherwise: the operator, for a version of f8sub that has no such function.
        of: what the call's tensors are each time, in words; None for a function that is not of ``at_one_place``.
    """
    # Code that Inductor kept on disk may name an operator that this version calls otherwise.
    maker = None if of is None else at_one_place.get(operator)
    return direct.get(operator, otherwise) if maker is None else maker()


@constant_result
def enter_graph_functions() -> None:
    """Make dynamo know the functions of ``in_graph``: it calls this while it traces, before it comes to them."""
    require(COMPILATION)
    while _in_graphs:
        torch.compiler.allow_in_graph(_in_graphs.pop())
    # By their number: features that are imported later have operators of their own.
    _call_directly(len(direct))
    _tag_autograd_functions()


@functools.cache
def _call_directly(known: int) -> None:
    for operator in direct:
        call_directly(operator, f"{__name__}.{function_of_call.__name__}", by_place=operator in at_one_place)


@functools.cache
def _tag_autograd_functions() -> None:
    """Have functions that are checkpointed without a policy repeat what autograd functions in them do, too.

    torch 2.11 tags for recomputation what dynamo's graph of the checkpointed function has, and not what the forward of
    an autograd function in it has: compiled code would save all that it makes. torch 2.13 has no such tags.
    """
    operator = tag_of_checkpoints()
    tag_nodes = getattr(operator, "tag_nodes", None)
    # torch from 2.13 on has no such tags.
    if tag_nodes is None:
        return

    @functools.wraps(tag_nodes)
    def tag(graph_module: torch.fx.GraphModule, is_sac: bool) -> torch.fx.GraphModule:
        tag_nodes(graph_module, is_sac)
        for node in () if is_sac else graph_module.graph.nodes:
            if node.target is torch.ops.higher_order.autograd_function_apply:
                forward: Any = getattr(graph_module, node.args[0].target)
                for each in forward.graph.nodes:
                    each.meta |= {name: node.meta[name] for name in ("ac_graph_id", "recompute")}
        return graph_module

    operator.tag_nodes = staticmethod(tag)


def save_when_checkpointed(reduction: Any) -> None:
    """Have a graph that is being traced save what ``reduction``, an operator, made last, and what is made of it.

    Whatever the checkpointed function's policy says, which stands in the nodes' ``meta``. For small results alone.
    """
    mode = get_proxy_mode()
    # From the newest node back to the reduction.
    for node in () if mode is None else reversed(mode.tracer.graph.nodes):
        if "recompute" in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if node.target is reduction:
            break


def policies() -> list[Callable[..., Any]]:
    """The policies of the checkpointed functions that are being traced or run."""
    return [mode.policy_fn for mode in dispatch_modes() if isinstance(mode, SelectiveCheckpoint)]


def save_last_node() -> None:
    """Have a graph that is being traced save what was made last, where a function is checkpointed by a policy.

    Whatever the policy says. torch's mode of selective checkpointing detaches every result, so views that it made come
    after it. From torch 2.13 on functions without a policy are in that mode, too, with one that saves nothing.
    """
    if all(getattr(policy, "__name__", "") == "_always_prefer_recompute" for policy in policies()):
        return
    tracing = get_proxy_mode()
    for node in () if tracing is None else reversed(tracing.tracer.graph.nodes):
        if "recompute" in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if node.target not in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            break
