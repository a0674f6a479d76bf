"""Recipe contexts: another recipe, or none, for the forwards inside them; and which plan a forward uses.

A plan is the layer's own, its context's, or that of the forward that is repeated. The contexts are
``f8sub.autocast``'s, one stack a thread. Backward uses what its forward captured, so contexts matter to forwards alone.
Activation checkpointing repeats forwards inside backward, when their context has been left: ``torch.utils.checkpoint``
restores ``torch.autocast`` and knows nothing of ours. A context that was entered inside the checkpointed function is
entered again. Without one such a forward finds the node that the original left in the graph that is being executed, and
uses its plan. A reentrant checkpoint leaves no node: there a context around it is an error in backward.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from f8sub.errors import Float8ConfigError
from f8sub.formats import Float8Format, why_not_derivable
from f8sub.kernels.gemm.select import Plan
from f8sub.linear.saved_input import why_not_kept
from f8sub.recipe import HIGH_PRECISION_GEMM, Recipe, get_recipe
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import (
    autograd_node,
    constant_result,
    graph_task,
    is_dtensor,
    is_to_be_executed,
    saved_tensors_hook,
)
from f8sub.weights.primary_weight import PrimaryWeight

was_entered = False
"""True once any context was entered; until then a forward looks no further than its layer's own plan."""


class _Entry(threading.local):
    """The innermost context of a thread, None outside of any.

    Its recipe's key (None: each layer's own), ``_place()`` when it was entered, and the entry around it; a tuple,
    because ``torch.compile`` guards on no more of it than is read.
    """

    def __init__(self) -> None:
        self.innermost: tuple[str | None, tuple[int, bool, Any], Any] | None = None


class _Plans:
    """Plan, or why there is none, of each question asked so far, see ``_asked``.

    Attributes, not items: ``torch.compile`` guards on those alone that a layer reads.
    """


_plans = _Plans()
_entry = _Entry()
# Autograd repeats checkpointed forwards on threads of its own, and these read the records of other threads.
_lock = threading.Lock()
_keys: dict[Recipe, str] = {}
_recipes: dict[str, Recipe] = {}


def key_of(recipe: Recipe) -> str:
    """A word for the recipe, one for equal ones: ``torch.compile`` takes words for constants and guards on them."""
    with _lock:
        if recipe not in _keys:
            # Users' recipes may share a name with another one, and a key tells them apart.
            key = recipe.name if recipe.name not in _recipes else f"{recipe.name} ({len(_recipes)})"
            _keys[recipe], _recipes[key] = key, recipe
        return _keys[recipe]


# The place of compiled code, whose forwards are not remembered: see ``remember``.
_COMPILED = (-1, True, None)


def _place() -> tuple[int, bool, Any]:
    """Return where this thread is: in which backward, and in which checkpointed function, as far as that shows.

    A non-reentrant checkpoint runs its function under a saved-tensors hook of its own, a reentrant one without grad.
    """
    return graph_task(), torch.is_grad_enabled(), saved_tensors_hook()


def enter(key: str | None) -> None:
    """Have the forwards of this thread use the recipe of that key, or with None each layer's own."""
    global was_entered
    was_entered = True
    place = _COMPILED if torch.compiler.is_compiling() else _place()
    _entry.innermost = key, place, _entry.innermost


def leave() -> None:
    """Go back to what was before the last ``enter``."""
    if _entry.innermost is not None:
        _entry.innermost = _entry.innermost[2]


def plan_in_use(layer: Any, weight: torch.Tensor) -> Any:
    """The plan of a forward that begins now.

    Args:
        layer: a converted module.
        weight: that it multiplies by.

    Raises:
        Float8ConfigError: the context's recipe cannot be used with the layer's weight as it was gathered or on the
            layer's device; or the forward repeats one that may have used another plan.
    """
    innermost = _entry.innermost
    if not torch.compiler.is_compiling():
        task = graph_task()
        # Within backward, and no context was entered there: activation checkpointing repeats a forward.
        if task != -1 and (innermost is None or innermost[1][0] != task):
            return _plan_of_repeated(layer)
    if innermost is None or innermost[0] is None:
        return layer._f8sub.plan
    state = layer._f8sub
    asked = _asked(state.plan.key, innermost[0], _is_codes(weight), state.keep_x)
    plan: Any = getattr(_plans, asked)
    if isinstance(plan, str):
        raise Float8ConfigError(f"{state.fqn}: {plan}")
    return plan


def key_in_use(layer: Any, weight: torch.Tensor) -> str:
    """``plan_in_use``'s key, in compiled code.

    Asked here: of what compiled code has written to a global, dynamo knows in functions of the module alone.
    """
    innermost = _entry.innermost if was_entered else None
    if innermost is None or innermost[0] is None:
        own: str = layer._f8sub.key
        return own
    key: str = plan_in_use(layer, weight).key
    return key


def _is_codes(weight: torch.Tensor) -> bool:
    """Return whether float8 codes are all there is of a weight: FSDP2 gathered them, or its master was dropped."""
    if is_dtensor(weight):
        weight = weight._local_tensor
    if isinstance(weight, PrimaryWeight):
        return weight.primary.master is None
    return isinstance(weight, Float8Tensor)


@constant_result
def _asked(own: str, key: str, codes: bool, keep_x: str) -> str:
    """Attribute of ``_plans`` that holds a layer's plan for the recipe of ``key``, or why there is none.

    Args:
        own: key of the plan that the layer was converted with; dynamo of 2.11 cannot hand over the plan itself.
        key: see ``key_of``.
        codes: see ``_is_codes``.
        keep_x: the layer's.
    """
    name = f"{key} for {own}, codes={codes}, keep_x={keep_x}"
    if not hasattr(_plans, name):
        # A reason is kept like a plan: the caller raises it with the name of its layer.
        setattr(_plans, name, _make(Plan.made[own], _recipes[key], codes, keep_x))
    return name


def _make(own: Any, recipe: Recipe, codes: bool, keep_x: str) -> Any:
    """The plan, of the kind of ``own``, or why there is none."""
    wire = own.recipe.fprop.b
    if codes and wire is not None and (reason := _why_not_readable(wire, recipe)):
        return (
            f"recipe {recipe.name!r} of the context cannot be used, because {reason}. Enter a context with a recipe "
            f"whose fprop.b is {wire} as in {own.recipe.name!r}, or convert with float8_all_gather=False"
        )
    if reason := why_not_kept(recipe, keep_x):
        return (
            f"recipe {recipe.name!r} of the context cannot be used with keep_x={keep_x!r}, because {reason}. Enter a "
            "context with another recipe, or convert the layer with keep_x='auto'"
        )
    try:
        return own.with_recipe(recipe)
    except Float8ConfigError as error:
        return f"recipe {recipe.name!r} of the context: {error}"


def _why_not_readable(wire: Float8Format, recipe: Recipe) -> str | None:
    """Why a recipe cannot read a weight of which there are codes of ``wire`` alone; None when it can."""
    rowwise, columnwise = recipe.formats("w")
    if rowwise is not None and rowwise != wire:
        return f"its fprop reads the weight as {rowwise}, and what was gathered or kept of it is {wire}"
    if columnwise is not None and (reason := why_not_derivable(wire, columnwise)):
        return f"its dgrad reads the weight as {columnwise}, and what was gathered or kept of it is {wire}: {reason}"
    return None


class _Record:
    """The plans that a layer's forwards used, for forwards that activation checkpointing may repeat."""

    def __init__(self, layer: Any) -> None:
        self._converted = layer._f8sub.conversion
        # A node that is held would keep its graph, with all that is saved for backward.
        self._nodes: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._changes = -1
        self._without_graph: set[Any] = set()

    def of_graph(self, node: Any, plan: Any) -> None:
        """Remember a forward by its node, for as long as its graph lives."""
        with _lock:
            self._nodes[node] = plan

    def without_graph(self, plan: Any) -> None:
        """Remember a forward without a graph, of reentrant checkpointing maybe, until the weights change."""
        with _lock:
            if self._changes != self._converted.changes:
                self._changes = self._converted.changes
                self._without_graph.clear()
            self._without_graph.add(plan)

    def executed(self) -> set[Any]:
        """Plans of the forwards whose graph is being executed."""
        with _lock:
            return {plan for node, plan in self._nodes.items() if _is_executed(node)}

    def others(self, own: Any) -> set[Any]:
        """Plans but ``own`` of forwards without a graph.

        Those from before the weights changed are forgotten with the next such forward, not here: an optimizer may have
        stepped some of the weights in this very backward.
        """
        with _lock:
            return self._without_graph - {own}


_records: weakref.WeakKeyDictionary[torch.nn.Module, _Record] = weakref.WeakKeyDictionary()


def _record_of(layer: torch.nn.Module) -> _Record:
    with _lock:
        if layer not in _records:
            _records[layer] = _Record(layer)
        return _records[layer]


def remember(layer: torch.nn.Module, plan: Any, y: torch.Tensor) -> None:
    """Remember the forward that made ``y``, if it may be repeated where its context is not entered again.

    Args:
        layer: that ran.
        plan: that it used.
        y: what the product's one node returned, or what was put together of several nodes' results.
    """
    if torch.compiler.is_compiling():
        return
    innermost, place = _entry.innermost, _place()
    # The context was entered inside the checkpointed function, and is entered again with it.
    if innermost is not None and innermost[1] == place:
        return
    _, grad_enabled, hook = place
    # A non-reentrant checkpoint leaves a graph, which lives until backward repeats the forward; a reentrant one none.
    if grad_enabled and hook is not None and (node := _node_of(y)) is not None:
        _record_of(layer).of_graph(node, plan)
    elif not grad_enabled and layer.training:
        _record_of(layer).without_graph(plan)


def _node_of(y: torch.Tensor) -> Any:
    """The node of the product, of which Python has an object to refer to weakly; one of several, which run together."""
    nodes = [] if y.grad_fn is None else [y.grad_fn, *(node for node, _ in y.grad_fn.next_functions)]
    return next((node for node in nodes if isinstance(node, torch.autograd.function.BackwardCFunction)), None)


def _plan_of_repeated(layer: Any) -> Any:
    record = _record_of(layer)
    plans = record.executed()
    # Every forward of the layer in this graph used that plan, whichever of them is repeated.
    if len(plans) == 1:
        return plans.pop()
    plans = plans or record.others(layer._f8sub.plan)
    # No forward used another plan, so this one did not either.
    if not plans:
        return layer._f8sub.plan
    names = ", ".join(sorted(plan.recipe.name for plan in plans))
    raise Float8ConfigError(
        f"{layer._f8sub.fqn}: its forward is repeated inside backward by activation checkpointing, and a context "
        f"around the checkpointed function had it run with {names} before. Enter f8sub.autocast inside the "
        "checkpointed function"
    )


def _is_executed(node: Any) -> bool:
    """Return whether the backward pass that runs on this thread executes ``node``.

    The engine does not count the tensor that ``backward`` was called on, whose node is the one that runs first.
    """
    return node is autograd_node() or bool(is_to_be_executed(node))


def recipes_entered() -> tuple[str | None, ...]:
    """The keys of the contexts that this thread is in, the innermost first."""
    found, entry = [], _entry.innermost
    while entry is not None:
        found.append(entry[0])
        entry = entry[2]
    return tuple(found)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_HIGH_PRECISION = Recipe(
    name="high precision",
    fprop=HIGH_PRECISION_GEMM,
    dgrad=HIGH_PRECISION_GEMM,
    wgrad=HIGH_PRECISION_GEMM,
)


class autocast:
    """Run the forwards of converted layers and experts in the context with another recipe, or in high precision.

        with f8sub.autocast(recipe="rowwise"):
            y = model(x)            # every converted layer with that recipe
            with f8sub.autocast(enabled=False):
                z = model(x)        # in high precision
        y.backward(dy)              # as the forward ran, context or not

    Contexts nest, the inner one overrides; the outer one is back when it is left, by an exception too. Each thread has
    its own, and one instance may be entered again, by several threads as well. It decorates functions, too. Backward,
    activation checkpointing included, uses what its forward used, so a context around it does nothing.

    Only layers that ``convert_to_float8`` converted take part, and no other autocast is meant: ``torch.autocast``
    chooses the high-precision dtype, and combines with this one.

    Weights that FSDP2 gathers in float8 were cast with the layer's own recipe before the context is known. So there
    ``enabled=False`` computes in high precision with the gathered weight, dequantized, and a recipe has to read the
    weight in the format that was gathered, or in high precision. All others are read from the master weight itself.

    Args:
        recipe: one of ``recipe_names()``, or a ``Recipe``; None for the recipe that each layer was converted with.
            Inside compiled code torch 2.11 takes names alone.
        enabled: False for high precision; ``recipe`` is not used then.

    Raises:
        Float8ConfigError: here, an unknown recipe, or a flag in its place; in a layer's forward, a recipe that it
            cannot run, see above.
    """

    def __init__(self, recipe: Recipe | str | None = None, enabled: bool = True) -> None:
        if isinstance(recipe, bool):
            raise Float8ConfigError(
                f"the first argument of f8sub.autocast is a recipe, got {recipe}; write autocast(enabled={recipe})"
            )
        self._recipe, self._enabled = recipe, enabled
        # Looked up even where it is not used, so that a wrong name is always an error.
        asked = None if recipe is None else _key_of(recipe)
        self._key = asked if enabled else _key_of(None)

    def __call__(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """``function``, run inside the context."""
        recipe, enabled = self._recipe, self._enabled

        @functools.wraps(function)
        def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            # Made anew: dynamo does not enter a context that was made outside of what it compiles.
            with autocast(recipe, enabled):
                return function(*args, **kwargs)

        return run

    def __enter__(self) -> "autocast":
        enter(self._key)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave()


@constant_result
def _key_of(recipe: Recipe | str | None) -> str:
    """Return the key of a recipe; that of high precision where ``recipe`` is None.

    In compiled code dynamo of torch 2.11 hands over a recipe's name alone, and no ``Recipe``.
    """
    return key_of(_HIGH_PRECISION if recipe is None else get_recipe(recipe))
