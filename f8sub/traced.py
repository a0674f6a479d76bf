"""Layer 6. What a module's own forward does, as a graph."""

import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx


class Tracer(fx.Tracer):
    """Sees a module's own forward and nothing below it."""

    def is_leaf_module(self, module: torch.nn.Module, module_qualified_name: str) -> bool:
        """All are."""
        return True


def calls_of(module: torch.nn.Module) -> dict[str, list[tuple[str, torch.nn.Module | None]]]:
    """For each module that a module's forward calls, what reads the result there.

    Returns:
        From a called module's name to those that read what it returns: a module's name and the module, or an
        operator's name and None.
    """
    called: dict[str, list[tuple[str, torch.nn.Module | None]]] = {}
    caller = _Caller(module)
    for node in _FlowTracer().trace(caller).nodes:
        if node.op == "call_module":
            readers = called.setdefault(_inner(node.target), [])
            for user in node.users:
                is_module = user.op == "call_module"
                name = _inner(user.target) if is_module else user.name
                readers.append((name, caller.get_submodule(str(user.target)) if is_module else None))
    return called


def _inner(target: Any) -> str:
    return str(target).removeprefix("module.")


class _Caller(torch.nn.Module):
    """Calls a forward with what it cannot do without: graphs know no ``**kwargs``."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, given: Any) -> Any:
        parameters = inspect.signature(self.module.forward).parameters.values()
        needed = [
            p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        by_name = {p.name: given[p.name] for p in needed if p.kind is p.KEYWORD_ONLY}
        return self.module.forward(*(given[p.name] for p in needed if p.name not in by_name), **by_name)


class _FlowTracer(Tracer):
    """Sees what is read by what, of forwards too whose branches and shapes no graph can hold.

    A value that is iterated over has two elements, and ``**kwargs`` none; of a branch on a value one way is seen.
    """

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """As many as are unpacked, where that can be told."""
        try:
            return super().iter(obj)
        except fx.proxy.TraceError:
            return iter([obj[0], obj[1]])  # type: ignore[index]

    def keys(self, obj: fx.Proxy) -> Any:
        """None."""
        return iter(())

    def to_bool(self, obj: fx.Proxy) -> bool:
        """False."""
        return False


def is_node(node: Any) -> bool:
    """Whether an argument is what another node made."""
    return isinstance(node, fx.Node)


def result_of(graph: fx.Graph) -> Any:
    """What a graph returns."""
    return next(node.args[0] for node in graph.nodes if node.op == "output")


def is_call(node: Any, name: str, *functions: Any) -> bool:
    """Whether a node calls a tensor's method of that name, torch's function, or one of ``functions``."""
    if not is_node(node):
        return False
    if node.op == "call_method":
        return bool(node.target == name)
    known = (*functions, getattr(torch, name, None), getattr(operator, name, None))
    return node.op == "call_function" and any(node.target is one for one in known if one is not None)
