"""precompute_scales: fresh scales for every gathered weight, by one all-reduce per step."""

import functools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from f8sub.capture import current_capture, is_capturing
from f8sub.errors import (
    Float8ConfigError,
    Float8Warning,
    first_and_more,
    refuse_other_than_an_optimizer,
    shown,
)
from f8sub.torch_compat import (
    after_counted_writes,
    gathered_parameters,
    is_dtensor,
    makes_optimizer_state,
    untraced,
)
from f8sub.weights.conversion import Conversion
from f8sub.weights.master_weight import MasterWeight, mark_stale_by_replays
from f8sub.weights.weight import (
    Weight,
    conversion_beside,
    conversion_of,
    local_tensor,
    local_tensors,
    master_of,
    of_gathered,
    refuse_gathered,
)


def precompute_scales(model: torch.nn.Module | Iterable[torch.nn.Module]) -> None:
    """Compute the scales of all float8-gathered weights from the weights as they are now.

    Call it once after ``fully_shard`` and after every ``optimizer.step()``. It begins one all-reduce for each process
    group that shards weights, and the host does not wait for it. On a GPU the current stream does, so that a CUDA graph
    may be captured or replayed next; on a CPU the all-reduce ends before the next all-gather. Without the call training
    is right too, and the next all-gather waits. Weights that are not sharded are looked at for NaN and infinity alone.

    Args:
        model: the converted model, or the parts of it that this rank holds. The scales of all layers of one
            ``convert_to_float8`` call are computed together, whichever part is given.

    Raises:
        Float8ConfigError: no model that ``convert_to_float8`` saw, or a CUDA graph of sharded weights is captured.
        Float8NumericsError: the previous call found NaN or infinity in a weight (a recipe may look for it in x and dy
            too, and say so one call later), and from then on in each call until the weight is finite; names the layers.
            The same on every rank, but for experts of other ranks,
            and for weights that are sharded and gathered in high precision: there on the ranks that hold it.
        Float8RankMismatchError: at the first call, ranks that were converted differently.
    """
    for conversion in conversions_of(parts_of(model)):
        # First, because it may give new exchanges: ``fully_shard`` may have been called since.
        conversion.refresh(asked=True)
        for exchange in conversion.exchanges.values():
            shard = exchange.table.shards[0]
            if is_capturing(shard.scales.amax) and current_capture() is None:
                raise Float8ConfigError(
                    f"{shard.fqn}: precompute_scales(model) is called while a CUDA graph of its sharded weight is "
                    "captured; capture forward and backward alone, and call it after each optimizer step, or have "
                    "f8sub.graph_step capture the whole step"
                )
        for guest in conversion.guests_with_past:
            guest.precompute()
        for exchange in conversion.exchanges.values():
            exchange.request()
        for guest in conversion.guests:
            guest.requested()


@functools.cache
def watch_writes() -> None:
    """Have every optimizer and all compiled code mark the weights that they change past the dispatch that would."""
    # Hooks of all optimizers: a training loop need not tell f8sub which one steps its weights.
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    after_counted_writes(_written)


def _written(tensor: torch.Tensor) -> None:
    """Mark a weight that compiled code wrote to, which knows it as a DTensor, a primary weight or another view."""
    if (master := master_of(local_tensor(tensor))) is not None:
        master.mark_stale()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    stepped = _stepped_by(optimizer, Weight)
    if not torch.compiler.is_compiling():
        _warn_of_early(optimizer, stepped)
        if optimizer not in _begun:
            _begun.add(optimizer)
            _warn_of_gone(stepped)
            # Once: FSDP2 keeps the same tensor from forward to forward.
            if found := gathered_parameters(optimizer):
                warnings.warn(of_gathered(optimizer, found), Float8Warning, stacklevel=4)
    for conversion, weights in stepped.items():
        if conversion is not None and not torch.compiler.is_compiling():
            _warn_of_gathered(optimizer, conversion, weights)
        for guest in () if conversion is None else conversion.guests:
            guest.before_step(optimizer, weights)
    # Before the step: a compiled or fused one writes to the weights without dispatch. With a closure the model still
    # runs before they change, so the mark comes after.
    capture = current_capture()
    if not has_closure(args, kwargs):
        _mark_stale(stepped, by_replays=capture is not None)
    if capture is not None:
        # Replays run no hooks: each one marks what the captured step writes to.
        capture.after_replay(lambda: _mark_stale(stepped, by_replays=True))
        capture.if_it_fails(lambda: _mark_stale(stepped))


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    late = Conversion.counts_steps or has_closure(args, kwargs)
    hooks = optimizer._optimizer_step_post_hooks.values()
    # An optimizer's own hooks run before those of all optimizers.
    if late and not any(isinstance(hook, _PrecomputeHook) for hook in hooks):
        enter_step(optimizer, args, kwargs)


@untraced
def enter_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Note that an optimizer's step, with these arguments, ended."""
    stepped = _stepped_by(optimizer)
    if has_closure(args, kwargs):
        _mark_stale(stepped)
    # An optimizer that steps others, as torchtitan's container does: their steps were entered.
    if Conversion.counts_steps and not hasattr(optimizer, "optimizers"):
        for conversion, weights in stepped.items():
            for guest in () if conversion is None else conversion.guests:
                guest.stepped(weights)
        for conversion in _followers_of(optimizer):
            for guest in () if conversion in stepped else conversion.guests:
                guest.stepped_others()


def has_closure(args: Any, kwargs: Any) -> bool:
    """Return whether the model runs within the step, before the weights change, as in all steps of Lightning."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


def _stepped_by(
    optimizer: torch.optim.Optimizer, kind: type[Weight] = MasterWeight
) -> dict[Conversion | None, list[torch.Tensor]]:
    """Return the parameters of an optimizer that are weights of a kind, by their conversions."""
    found = defaultdict(list)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = local_tensor(parameter)
            if isinstance(local, kind):
                found[None if local.record is None else local.record.conversion].append(parameter)
    return found


_Follow = tuple[tuple[int, int], list[weakref.ref[Conversion]]]
_followers: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Follow] = weakref.WeakKeyDictionary()
"""What ``_followers_of`` found, and with how many parameters and conversions."""


def _followers_of(optimizer: torch.optim.Optimizer) -> list[Conversion]:
    """Return the conversions that follow a model of which the optimizer has parameters."""
    if not Conversion.followed:
        return []
    # A model is walked again only when the optimizer has more of it, or another conversion came.
    current = Conversion.made, sum(len(group["params"]) for group in optimizer.param_groups)
    known, found = _followers.get(optimizer, ((-1, -1), []))
    if known != current:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = [
            follower
            for model, followers in Conversion.followed.items()
            if not held.isdisjoint(map(id, model.parameters()))
            for follower in followers
        ]
        # None are looked for again: a forward may hold gathered parameters in the place of the optimizer's.
        if found:
            _followers[optimizer] = current, found
    return [conversion for follower in found if (conversion := follower()) is not None]


_early: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that were told of."""


def _warn_of_early(
    optimizer: torch.optim.Optimizer, stepped: Mapping[Conversion | None, Sequence[torch.Tensor]]
) -> None:
    """Warn, once, of an optimizer that was made before ``fully_shard``: it holds parameters that no module has."""
    if optimizer in _early:
        return
    for weight in (weight for weights in stepped.values() for weight in weights if not is_dtensor(weight)):
        record = local_tensor(weight).record  # type: ignore[attr-defined]
        if record is not None and record.entered and is_dtensor(record.parameter):
            _early.add(optimizer)
            warnings.warn(
                f"{record.fqn}: the {type(optimizer).__name__} was created before fully_shard, which replaced the "
                "parameters it steps, so it trains nothing; create it from model.parameters() after fully_shard",
                Float8Warning,
                stacklevel=4,
            )
            return


_begun: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that stepped converted weights."""


def _warn_of_gone(stepped: Mapping[Conversion | None, Sequence[torch.Tensor]]) -> None:
    """Warn where others train weights of converted modules that are gone; ``precompute_scales`` may never be called."""
    gone = [
        record.fqn
        for conversion, weights in stepped.items()
        for weight in weights
        if weight.grad is not None
        and (record := local_tensor(weight).record) is not None  # type: ignore[attr-defined]
        and record.module is None
        and not record.told
        and not _is_tied(conversion, weight)
    ]
    if gone:
        warnings.warn(
            _replaced(gone, "layers of others, which train their weights"), Float8Warning, stacklevel=5
        )


_stepped_gathered: weakref.WeakSet[Conversion] = weakref.WeakSet()
"""Conversions that ``_warn_of_gathered`` warned of."""


def _warn_of_gathered(
    optimizer: torch.optim.Optimizer, conversion: Conversion, weights: Sequence[torch.Tensor]
) -> None:
    """Warn, once, of weights that FSDP2 has gathered while they are stepped: it does not gather those again."""
    if conversion in _stepped_gathered:
        return
    in_use = {shard for exchange in conversion.exchanges.values() for shard in exchange.in_use()}
    if not in_use or makes_optimizer_state():
        return
    records = [local_tensor(weight).record for weight in weights if weight.grad is not None]  # type: ignore[attr-defined]
    if fqns := [record.fqn for record in records if record is not None and record.shard in in_use]:
        _stepped_gathered.add(conversion)
        warnings.warn(
            f"{first_and_more(fqns)}: stepped by the {type(optimizer).__name__} while FSDP2 has it gathered, so the "
            "next forward multiplies by the weight from before the step, as in high precision; have the last backward "
            "reshard, model.set_reshard_after_backward(True), or call reshard() on every FSDPModule before the step",
            Float8Warning,
            stacklevel=5,
        )


def _is_tied(conversion: Conversion | None, weight: torch.Tensor) -> bool:
    """Return whether a converted module that is there has the weight, one of those that shared it."""
    return conversion is not None and any(record.parameter is weight for record in conversion.records)


def _replaced(fqns: Iterable[str], by: str) -> str:
    return (
        f"{', '.join(fqns)}: converted to float8 by f8sub, and replaced since by {by}, so f8sub does nothing there any "
        "more. Convert a model by one library: leave out the other conversion, such as "
        "Accelerator(mixed_precision=\"fp8\") or torchao's convert_to_float8_training, or f8sub's"
    )


def _mark_stale(stepped: dict[Conversion | None, list[torch.Tensor]], *, by_replays: bool = False) -> None:
    for conversion, weights in stepped.items():
        masters = [local for local in local_tensors(weights) if isinstance(local, MasterWeight)]
        if by_replays:
            mark_stale_by_replays(masters)
        else:
            for master in masters:
                master.mark_stale()
        # A count that every rank has: each one steps its optimizer, whether or not its shards have elements.
        if masters and conversion is not None:
            conversion.changes += 1


_Walk = tuple[int, int, list[weakref.ref[Conversion]]]
_walked: weakref.WeakKeyDictionary[torch.nn.Module, _Walk] = weakref.WeakKeyDictionary()
"""What ``conversions_of`` found, and in how many modules. A conversion may lead to the module, and is not held here."""


def parts_of(model: torch.nn.Module | Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return what ``precompute_scales`` takes, as a list."""
    is_one = isinstance(model, torch.nn.Module | Mapping | str | torch.Tensor)
    return [model] if is_one or not isinstance(model, Iterable) else list(model)  # type: ignore[list-item]


def conversions_of(parts: list[torch.nn.Module]) -> list[Conversion]:
    """Return the conversions that the modules' layers belong to.

    A module is walked again only after another conversion, or when converted modules are gone. Modules that others
    replaced are then a Float8Warning.
    """
    found: dict[Conversion, None] = {}
    for index, part in enumerate(parts):
        at = "" if len(parts) == 1 else f" at index {index} of {len(parts)}"
        if not isinstance(part, torch.nn.Module):
            raise Float8ConfigError(
                f"precompute_scales takes a model that convert_to_float8 converted, or a list of parts, got "
                f"{shown(part)}{at}"
            )
        # Walking a large model's modules takes milliseconds, each step: walk only if the number of conversions or of
        # their modules changed.
        made, alive, known = _walked.get(part, (-1, 0, []))
        conversions = [conversion for reference in known if (conversion := reference()) is not None]
        if made != Conversion.made or alive != sum(conversion.alive for conversion in conversions):
            of_modules = (found(m) for m in part.modules() for found in (conversion_of, conversion_beside))
            conversions = list(dict.fromkeys(c for c in of_modules if c is not None))
            if not conversions and not Conversion.saw(part):
                raise Float8ConfigError(
                    f"precompute_scales was given a {type(part).__name__}{at} that was never converted, so it has no "
                    "float8 weights; call f8sub.convert_to_float8(model) first, before fully_shard"
                )
            warn_of_replaced(part)
            alive = sum(conversion.alive for conversion in conversions)
            _walked[part] = Conversion.made, alive, [weakref.ref(conversion) for conversion in conversions]
        found.update(dict.fromkeys(conversions))
    return list(found)


_told: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()
"""What ``warn_of_replaced`` told of a model last."""


def warn_of_replaced(part: torch.nn.Module, stacklevel: int = 4) -> None:
    """Warn once of converted modules whose place others took, see ``Conversion.replaced``."""
    replaced = Conversion.replaced(part)
    if not replaced or _told.get(part) == replaced:
        return
    _told[part] = replaced
    for fqn in replaced:
        for weight in map(local_tensor, part.get_submodule(fqn).parameters()):
            if isinstance(weight, Weight) and weight.record is not None:
                weight.record.told = True  # by which a step of its optimizer need not tell it again
    by = ", ".join(sorted(set(replaced.values())))
    warnings.warn(_replaced(replaced, by), Float8Warning, stacklevel=stacklevel)


def register_precompute_hook(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | Iterable[torch.nn.Module],
) -> torch.utils.hooks.RemovableHandle:
    """Call ``precompute_scales(model)`` after every ``optimizer.step()``; accelerate's wrapper is taken too.

    Returns a handle that removes the hook again.

    Raises:
        Float8ConfigError: ``convert_to_float8`` saw no model, or the optimizer steps no parameter of it.
    """
    parts = parts_of(model)
    conversions_of(parts)
    runs_hooks: Any = optimizer
    while not hasattr(runs_hooks, "_optimizer_step_post_hooks") and hasattr(runs_hooks, "optimizer"):
        runs_hooks = runs_hooks.optimizer  # accelerate's wrapper has no hooks of its own
    refuse_other_than_an_optimizer("register_precompute_hook", runs_hooks)
    refuse_gathered("register_precompute_hook", runs_hooks)
    stepped = {id(parameter) for group in runs_hooks.param_groups for parameter in group["params"]}
    if stepped.isdisjoint(id(parameter) for part in parts for parameter in part.parameters()):
        raise Float8ConfigError(
            f"register_precompute_hook: the {type(runs_hooks).__name__} steps no parameter of the model: it is another "
            "model's, or was created before fully_shard, which replaces parameters; create the optimizer "
            "from model.parameters() after fully_shard"
        )
    handle: torch.utils.hooks.RemovableHandle = runs_hooks.register_step_post_hook(_PrecomputeHook(parts))
    return handle


class _PrecomputeHook:
    """Precomputes scales; the optimizer's first such hook enters the step, as hooks of all optimizers run later."""

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        self.parts = parts

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        hooks = optimizer._optimizer_step_post_hooks.values()
        if next(hook for hook in hooks if isinstance(hook, _PrecomputeHook)) is self:
            enter_step(optimizer, args, kwargs)
        precompute_scales(self.parts)
