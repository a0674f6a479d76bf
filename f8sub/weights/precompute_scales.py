"""precompute_scales: fresh scales for every gathered weight, one all-reduce a step."""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from f8sub.errors import Float8ConfigError
from f8sub.torch_compat import is_capturing, untraced
from f8sub.weights.conversion import Conversion
from f8sub.weights.exchange import Exchange
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.weight import local_tensor


def precompute_scales(model: torch.nn.Module | Iterable[torch.nn.Module]) -> None:
    """Compute the scales of all float8-gathered weights from the weights as they are now.

    Call it once after ``fully_shard`` and after every ``optimizer.step()``. One all-reduce for each process group
    that shards weights. Without it training is right too, with the same all-reduce on the way of the next all-gather.
    Weights that are not sharded are looked at for NaN and infinity alone.

    Does not wait: the all-reduce ends before the next all-gather, so that it overlaps with whatever comes between.

    Args:
        model: the converted model, or the parts of it that this rank holds. The scales of all layers of one
            ``convert_to_float8`` call are computed together, whichever part is given.

    Raises:
        Float8ConfigError: a model that ``convert_to_float8`` never saw, or something that is no model; or a CUDA graph
            of sharded weights is captured.
        Float8NumericsError: NaN or infinity was found in a weight by the previous call; names the layers. On every
            rank alike, except for weights that are sharded and gathered in high precision: there on the ranks that
            hold it. With delayed scaling in an x or a dy too, at the latest one call later.
        Float8RankMismatchError: at the first call, ranks that were converted differently.
    """
    for conversion in _conversions(_parts_of(model)):
        conversion.refresh(asked=True)
        for exchange in conversion.exchanges.values():
            _check_not_captured(exchange)
        if Conversion.counts_steps:
            for guest in conversion.guests:
                guest.precompute()
        for exchange in conversion.exchanges.values():
            exchange.request()
        for guest in conversion.guests:
            guest.requested()


def _check_not_captured(exchange: Exchange) -> None:
    if is_capturing(exchange.shards[0].amax):
        raise Float8ConfigError(
            f"{exchange.shards[0].fqn}: precompute_scales(model) is called while a CUDA graph of its sharded weight is "
            "captured; capture forward and backward alone, and call it after each optimizer step, before the replay"
        )


def register_precompute_hook(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | Iterable[torch.nn.Module],
) -> torch.utils.hooks.RemovableHandle:
    """Call ``precompute_scales(model)`` after every ``optimizer.step()``.

    Args:
        optimizer: any, also the wrapper that accelerate makes of one.
        model: as of ``precompute_scales``.

    Returns:
        A handle whose ``remove()`` takes the hook out again.

    Raises:
        Float8ConfigError: a model that ``convert_to_float8`` never saw, or something that is no model.
    """
    parts = _parts_of(model)
    _conversions(parts)
    runs_hooks: Any = optimizer
    while not hasattr(runs_hooks, "_optimizer_step_post_hooks"):
        runs_hooks = runs_hooks.optimizer  # accelerate's wrapper has no hooks of its own
    handle: torch.utils.hooks.RemovableHandle = runs_hooks.register_step_post_hook(_PrecomputeHook(parts))
    return handle


class _PrecomputeHook:
    """Enters the step that it follows, where it is the optimizer's first such hook, and precomputes the scales.

    Torch runs an optimizer's own hooks before those of all optimizers, which would enter the step too late.
    """

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        self.parts = parts

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _precompute_hook(optimizer) is self:
            _enter_step(optimizer, args, kwargs)
        precompute_scales(self.parts)


def _precompute_hook(optimizer: torch.optim.Optimizer) -> _PrecomputeHook | None:
    hooks = optimizer._optimizer_step_post_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, _PrecomputeHook)), None)


def check_ranks_hook(conversion: Conversion, module: torch.nn.Module, args: Any) -> None:
    """Forward pre-hook of a converted model: the check across ranks before any weight is gathered, once."""
    if torch.compiler.is_compiling():
        return
    conversion.refresh()
    _remove(check_ranks_hook, module)


def guests_hook(conversion: Conversion, module: torch.nn.Module, args: Any) -> None:
    """Forward pre-hook of a converted model, until all guests saw what they wait for."""
    if torch.compiler.is_compiling():
        return
    waiting = [guest for guest in conversion.guests if not guest.forward()]
    if not waiting:
        _remove(guests_hook, module)


def _remove(function: Callable[..., None], module: torch.nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if getattr(hook, "func", None) is function:
            del module._forward_pre_hooks[key]


@functools.cache
def watch_optimizer_steps() -> None:
    """Have every optimizer of this process mark the weights that it changes, and count its steps.

    Every rank steps its optimizer, so this is something all ranks know; and a compiled step bypasses the
    dispatch that would mark the weights otherwise.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _mark_stale(optimizer, changed=not _has_closure(args, kwargs))


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    late = Conversion.counts_steps or _has_closure(args, kwargs)
    if late and _precompute_hook(optimizer) is None:
        _enter_step(optimizer, args, kwargs)


@untraced
def _enter_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _has_closure(args, kwargs):
        _mark_stale(optimizer)
    # An optimizer that steps others, as torchtitan's container does: their steps were entered.
    if Conversion.counts_steps and not hasattr(optimizer, "optimizers"):
        _count_step(optimizer)


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Whether the model runs within the step, before the weights change: Lightning's steps are all like that."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


def _mark_stale(optimizer: torch.optim.Optimizer, *, changed: bool = True) -> None:
    """Mark the weights that the optimizer is about to change, or has just changed.

    Args:
        optimizer: whose weights.
        changed: False to refuse what cannot be stepped and mark nothing: ``_enter_step`` will.

    Raises:
        Float8ConfigError: a primary weight is stepped without its master.
    """
    conversions: set[Conversion] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = local_tensor(parameter)
            if not isinstance(local, MasterWeight):
                continue
            conversion = None if local.record is None else local.record.conversion
            if (
                conversion is not None
                and conversion.primary_weights
                and not (local.cell.taken or hasattr(optimizer, "takes_masters"))
                and parameter.requires_grad
            ):
                raise Float8ConfigError(
                    f"{type(optimizer).__name__} steps a weight of shape {tuple(parameter.shape)} that was converted "
                    "with primary_weights=True: wrap it in f8sub.optim.MasterWeights(optimizer), which keeps the "
                    "high-precision master, or convert with primary_weights=False"
                )
            if not changed:
                continue
            local.mark_stale()
            if conversion is not None:
                conversions.add(conversion)
    for conversion in conversions:
        conversion.changes += 1


def _count_step(optimizer: torch.optim.Optimizer) -> None:
    """Enter which weights the optimizer has just changed.

    Not before it changes them: LBFGS, and others that are given a closure, run the model within the step.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    weights = [local for p in parameters if isinstance(local := local_tensor(p), MasterWeight)]
    of_conversion = defaultdict(list)
    for weight in weights:
        if weight.record is not None and (conversion := weight.record.conversion) is not None:
            of_conversion[conversion].append(weight.record)
    for conversion, records in of_conversion.items():
        conversion.count_step(records)
    for conversion in of_conversion:
        for guest in conversion.guests:
            guest.counted()


_Conversions = list[weakref.ref[Conversion]]

_walked: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, _Conversions]] = weakref.WeakKeyDictionary()
"""What ``_conversions`` found. A conversion may lead to the module, and is not held here."""


def _parts_of(model: torch.nn.Module | Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The model, or its parts.

    Raises:
        Float8ConfigError: something that is no model and no list of models.
    """
    parts = [model] if isinstance(model, torch.nn.Module) or not isinstance(model, Iterable) else list(model)
    for index, part in enumerate(parts):
        if not isinstance(part, torch.nn.Module):
            raise Float8ConfigError(
                f"precompute_scales takes a model that convert_to_float8 converted, or a list of parts of it, got a "
                f"{type(part).__name__}{_place(index, parts)}"
            )
    return parts


def _place(index: int, parts: list[torch.nn.Module]) -> str:
    return "" if len(parts) == 1 else f" at index {index} of {len(parts)}"


def _conversions(parts: list[torch.nn.Module]) -> list[Conversion]:
    """The conversions that the modules' layers belong to; a module is walked anew only after another conversion.

    Raises:
        Float8ConfigError: a module that was never converted.
    """
    found: list[Conversion] = []
    for index, part in enumerate(parts):
        made, known = _walked.get(part, (-1, []))
        conversions = [conversion for reference in known if (conversion := reference()) is not None]
        if made != Conversion.made:
            of_modules = (module.__dict__.get("converted") for module in part.modules())
            conversions = list(dict.fromkeys(c for c in of_modules if isinstance(c, Conversion)))
            if not conversions and not Conversion.saw(part):
                raise Float8ConfigError(
                    f"precompute_scales was given a {type(part).__name__}{_place(index, parts)} that was never "
                    "converted, so it has no float8 weights; call f8sub.convert_to_float8(model) first, before "
                    "fully_shard"
                )
            _walked[part] = Conversion.made, [weakref.ref(conversion) for conversion in conversions]
        found += [conversion for conversion in conversions if conversion not in found]
    return found
