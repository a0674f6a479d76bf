"""Skips an optimizer step on all ranks if a gradient of any of them is not finite."""

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from f8sub.errors import Float8ConfigError, refuse_other_than_an_optimizer
from f8sub.optim import MasterWeights, conversions_of
from f8sub.torch_compat import untraced
from f8sub.weights.non_finite import SkippedSteps
from f8sub.weights.weight import local_tensor, refuse_gathered

if TYPE_CHECKING:
    from f8sub.weights.conversion import Conversion


def skip_step_if_nonfinite(
    optimizer: torch.optim.Optimizer, *, group: dist.ProcessGroup | None = None
) -> "StepGuard":
    """Make ``optimizer.step()`` change nothing from now on where NaN or infinity is in a gradient of any rank.

    Call it once, on every rank. Weights, momenta and step counters then stay as they were, bitwise. Call
    ``precompute_scales`` as after any step. For the amax histories of delayed scaling a skipped step is a step: they
    roll with the finite amaxes they were given, and NaN or infinity in an x or a dy is a ``Float8Warning`` from here
    on, no error, because it spoils nothing. NaN in a weight remains an error.

    One all-reduce of one number a step, so every rank steps as often as the others, which ``ddp.join()`` does not ask
    for. Of several optimizers each decides by its own gradients.

    Optimizers whose kernels take ``found_inf``, as ``GradScaler`` hands it to them (torch's with ``fused=True``, and
    ``MasterWeights`` of one), decide on the device, and the host waits for nothing. Of any other the host reads the
    number at every step, and where it is not 0 the optimizer is shown no gradients: it leaves parameters without one
    alone, and their states. The host also reads it at the first step at which a parameter has a gradient, before its
    state is created: fused SGD would leave its momentum uninitialized. ``torch.compile(optimizer.step)`` works with the
    former alone.

    Args:
        optimizer: any, before or after its first step; also under ``GradScaler``.
        group: the ranks whose steps are skipped together; all of the job, where None.

    Returns:
        The guard: ``int(guard.skipped)`` is the number of steps skipped so far, ``guard.remove()`` takes it off again.

    Raises:
        Float8ConfigError: the optimizer has a guard already; or, later, ``step`` is called with a closure, whose
            gradients are there only inside of it.
    """
    refuse_other_than_an_optimizer("skip_step_if_nonfinite", optimizer)
    refuse_gathered("skip_step_if_nonfinite", optimizer)
    if optimizer in _guarded:
        raise Float8ConfigError(
            f"skip_step_if_nonfinite was called for this {type(optimizer).__name__} before; keep the guard that it "
            "returned, or guard.remove() before another one is created"
        )
    return StepGuard(optimizer, group)


_guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class StepGuard:
    """See ``skip_step_if_nonfinite``.

    Attributes:
        skipped: int64, (), on the gradients' device: steps skipped so far. Reading it on the host waits for the device.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._conversions: set[Conversion] = set()
        self._groups_seen = 0
        # ids of parameters that have had a step, so that their states exist
        self._stepped: set[int] = set()
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._found_inf_before: list[torch.Tensor | None] = []
        first = next(p for g in optimizer.param_groups for p in g["params"])
        self.skipped = torch.zeros((), dtype=torch.int64, device=local_tensor(first).device)
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        # The optimizer holds the guard by its hooks.
        self._optimizer = weakref.ref(optimizer)
        _guarded.add(optimizer)
        self._enter_conversions(optimizer)

    def remove(self) -> None:
        """Let the optimizer step whatever its gradients are."""
        for handle in self._handles:
            handle.remove()
        if (optimizer := self._optimizer()) is not None:
            _guarded.discard(optimizer)
        for conversion in self._conversions:
            conversion.guest(SkippedSteps).guards.discard(self)

    def _enter_conversions(self, optimizer: torch.optim.Optimizer) -> None:
        """Enter the conversions of all parameters, also those of groups that were added since."""
        if self._groups_seen == len(optimizer.param_groups):
            return
        self._groups_seen = len(optimizer.param_groups)
        self._conversions |= conversions_of(p for g in optimizer.param_groups for p in g["params"])
        for conversion in self._conversions:
            conversion.guest(SkippedSteps).guards.add(self)

    @untraced
    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure") is not None or any(callable(argument) for argument in args):
            raise Float8ConfigError(
                f"skip_step_if_nonfinite looks at gradients before {type(optimizer).__name__}.step, and a closure "
                "computes them inside: call backward first and step() without a closure, or guard.remove()"
            )
        self._enter_conversions(optimizer)
        steps = optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer
        self._take_back(steps)  # what a step that raised left
        self._hidden = []
        given = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        found = self._found(given)
        self.skipped += found.to(self.skipped.dtype)
        # fused SGD creates its momentum in the first step: there the host decides.
        ready = {id(p) for p in given} <= self._stepped
        if ready and _takes_found_inf(steps):
            # GradScaler may have set its own: the step is skipped if either is 1.
            before = getattr(steps, "found_inf", None)
            self._found_inf_before = [before]
            steps.found_inf = found if before is None else torch.maximum(found, before.to(found))  # type: ignore[attr-defined]
        elif found.item():  # waits for the device
            # An optimizer steps no parameter without a gradient.
            self._hidden = [(p, p.grad) for p in given if p.grad is not None]
            for parameter in given:
                parameter.grad = None
        else:
            self._stepped |= {id(p) for p in given}

    @untraced
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        steps = optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer
        self._take_back(steps)
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def _take_back(self, optimizer: torch.optim.Optimizer) -> None:
        for before in self._found_inf_before:
            if before is None:
                vars(optimizer).pop("found_inf", None)
            else:
                optimizer.found_inf = before  # type: ignore[attr-defined]
        self._found_inf_before = []

    def _found(self, given: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return 1 where a gradient of any rank is not finite, else 0: float32, (); every rank joins at every step."""
        gradients = [local_tensor(p.grad) for p in given if p.grad is not None]
        gradients = [g._values() if g.is_sparse else g for g in gradients]
        found = torch.zeros((), dtype=torch.float32, device=self.skipped.device)
        for device in dict.fromkeys(gradient.device for gradient in gradients):
            if filled := [g for g in gradients if g.device == device and g.numel()]:
                # The maximum norm is finite only if all elements are; all norms are a few launches.
                finite = torch.stack([norm.isfinite() for norm in torch._foreach_norm(filled, torch.inf)])
                found = torch.maximum(found, (~finite.all()).to(found))
        # MAX: the 1 of one rank is that of all.
        if dist.is_initialized() and dist.get_world_size(self._group) > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return found


def _takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step does nothing where ``optimizer.found_inf`` is 1, for each of its groups."""
    fused = all(group.get("fused", True) for group in optimizer.param_groups)
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and fused
