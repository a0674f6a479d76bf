"""FusedStep: clipping, a step of AdamW and the amaxes of the new weights, in one pass over parameters and states.

The step is taken by a hook that runs before torch's own, which then finds no gradients and does nothing; a hook after
it puts them back. So a scheduler, a checkpoint and other hooks see the user's optimizer, with torch's states.

The amaxes go to the weights' shards, each with the state of the weight that it is of (``MasterWeight.state``). The next
reduction takes one where the weight is still in that state, and reads the weight again where it is not. A captured step
writes its amaxes where the reduction at the beginning of the next replay reads them, see ``AmaxTable.take_amaxes``.
"""

import functools
import itertools
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from f8sub.capture import current_capture
from f8sub.kernels.triton import adamw_launch
from f8sub.kernels.triton.adamw_launch import Options, Scalars, Stepped
from f8sub.torch_compat import call_first, is_dtensor, untraced
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.precompute_scales import has_closure
from f8sub.weights.shard import FoundAmaxes, Shard
from f8sub.weights.weight import local_tensor

_get_total_norm = torch.nn.utils.get_total_norm


@torch.no_grad()
def total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Return ``torch.nn.utils.get_total_norm``, (), of DTensors over all their ranks.

    Where f8sub has kernels one reads the tensors at the speed of memory. The norm is then rounded once, to float32, of
    sums that torch makes in another order.
    """
    gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    parts = _sharded_alike(gradients) if norm_type == 2.0 and not error_if_nonfinite else None
    if parts:
        return torch.stack([_squares(some, *how) for how, some in parts.items()]).sum().sqrt().float()
    norm = _get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    return norm.full_tensor() if is_dtensor(norm) else norm


_How = tuple[Any, tuple[int, ...]]
"""A device mesh, None of plain tensors, and its dimensions that shard."""


def _sharded_alike(gradients: list[torch.Tensor]) -> "dict[_How, list[torch.Tensor]] | None":
    """Return the local tensors by how they are sharded, in an order that all ranks share; None for torch to sum."""
    found: dict[_How, list[torch.Tensor]] = {}
    for gradient in gradients:
        how: _How = None, ()
        if is_dtensor(gradient):
            if not all(placement.is_shard() or placement.is_replicate() for placement in gradient.placements):
                return None
            dims = (dim for dim, placement in enumerate(gradient.placements) if placement.is_shard())
            how = gradient.device_mesh, tuple(dims)
        found.setdefault(how, []).append(local_tensor(gradient).detach())
    values = [local for some in found.values() for local in some if local.numel()]
    is_strided = all(value.layout is torch.strided for value in values)
    return found if is_strided and adamw_launch.why_not_of(values) is None else None


def _squares(tensors: list[torch.Tensor], mesh: Any, dims: tuple[int, ...]) -> torch.Tensor:
    """Return the sum of the squares of what ranks of these dimensions have of tensors, float64, ()."""
    values = [tensor.contiguous() for tensor in tensors if tensor.numel()]
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    if values:
        total = adamw_launch.sum_of_squares(values)
    for dim in dims:
        # Over the dimensions that shard alone: replicas have the same squares.
        dist.all_reduce(total, group=mesh.get_group(dim))
    return total


class _Group(NamedTuple):
    """What is stepped of a parameter group, and the shards that get amaxes, by their entries."""

    tensors: list[Stepped]
    options: Options


class _Clipped(NamedTuple):
    """A parameter with the gradient that the next step clips, and how often that was written to."""

    parameter: torch.Tensor
    gradient: "weakref.ref[torch.Tensor]"
    versions: tuple[int, int]

    @classmethod
    def all_of(cls, optimizer: torch.optim.Optimizer) -> "list[_Clipped]":
        pairs = [(parameter, parameter.grad) for parameter in _parameters_of(optimizer)]
        return [cls(p, weakref.ref(grad), _versions(grad)) for p, grad in pairs if grad is not None]

    @property
    def is_as_it_was(self) -> bool:
        now = self.parameter.grad
        return now is None or (now is self.gradient() and _versions(now) == self.versions)


def _versions(gradient: torch.Tensor) -> tuple[int, int]:
    # Of a DTensor's operators its own tensor counts some, and the DTensor others.
    return gradient._version, local_tensor(gradient)._version


class FusedStep:
    """See ``f8sub.optim.fuse_step``.

    Attributes:
        why_torch: why torch's own kernels took the last step; None where it was one pass.
        optimizers: those that have one.
        total_norm: the function of that name, for trainers that put a norm together by themselves.
    """

    total_norm = staticmethod(total_norm)

    optimizers: ClassVar[weakref.WeakSet[torch.optim.Optimizer]] = weakref.WeakSet()

    def __init__(self, optimizer: torch.optim.Optimizer, of_model: torch.optim.Optimizer) -> None:
        """Step for ``optimizer``; gradients to clip are those of the parameters that ``of_model`` has."""
        self.why_torch: str | None = None
        self._clip: torch.Tensor | None = None
        self._clipped: list[_Clipped] = []
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._found: FoundAmaxes | None = None
        self._pre = optimizer.register_step_pre_hook(self._before)
        self._post = optimizer.register_step_post_hook(self._after)
        # Others read gradients, or raise an error and would leave them hidden.
        call_first(self._post)
        # An optimizer holds this by its hooks, and MasterWeights the optimizer.
        self._optimizer, self._of_model = weakref.ref(optimizer), weakref.ref(of_model)
        self.optimizers.add(optimizer)

    def remove(self) -> None:
        """Let torch's own kernels step from now on."""
        self._pre.remove()
        self._post.remove()
        if (optimizer := self._optimizer()) is not None:
            self.optimizers.discard(optimizer)

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Have the next step multiply gradients as ``torch.nn.utils.clip_grad_norm_`` would; returns their norm.

        The gradients themselves stay as they are, so that nothing reads them once more. The norm, (), is that of all
        gradients of the optimizer, DTensors' over all ranks.

        Raises:
            RuntimeError: in the step, where a gradient was written to or replaced since, for that would be clipped too.
        """
        optimizer = self._of_model()
        weights = [] if optimizer is None else _parameters_of(optimizer)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        norm = total_norm(gradients, norm_type, error_if_nonfinite)
        self.clip_by(norm, max_norm)
        return norm

    @torch.no_grad()
    def clip_by(self, norm: torch.Tensor, max_norm: float) -> None:
        """Have the next step clip by a norm, (), that covers more than its gradients, such as those of other stages."""
        # The very operators of torch.nn.utils.clip_grads_with_norm_, for the same bits.
        clip = torch.clamp(max_norm / (norm + 1e-6), max=1.0).float()
        self._set_clip(clip)
        capture, optimizer = current_capture(), self._of_model()
        self._clipped = [] if capture is not None or optimizer is None else _Clipped.all_of(optimizer)
        if capture is not None:
            # For a step that is launched after each replay; one in the graph forgets it below.
            capture.before_replay(functools.partial(self._set_clip, clip))
            capture.if_it_fails(functools.partial(self._set_clip, None))

    def _set_clip(self, clip: torch.Tensor | None) -> None:
        self._clip = clip

    @untraced
    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back()
        clip, self._clip = self._clip, None
        clipped, self._clipped = self._clipped, []
        if written := [each for each in clipped if not each.is_as_it_was]:
            shape = tuple(written[0].parameter.shape)
            raise RuntimeError(
                f"the gradient of a parameter of shape {shape}, and {len(written) - 1} more, were written to or "
                "replaced between clip_grad_norm_ of fuse_step and the step, which clips what it finds: write to "
                "gradients before, or clip by torch.nn.utils.clip_grad_norm_"
            )
        found: tuple[list[_Group], list[Shard]] | str = "a closure computes the gradients inside the step"
        if not has_closure(args, kwargs):
            found = self._groups(optimizer)
        self.why_torch = found if isinstance(found, str) else None
        if not isinstance(found, str):
            self._step(optimizer, *found, clip)
        elif clip is not None:
            gradients = [local_tensor(p.grad) for p in _parameters_of(optimizer) if p.grad is not None]
            for device in dict.fromkeys(gradient.device for gradient in gradients):
                torch._foreach_mul_([g for g in gradients if g.device == device], clip.to(device))

    @untraced
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back()
        hooks = optimizer._optimizer_step_pre_hooks
        # The last of the hooks knows what all others decided, such as to skip the step.
        if next(reversed(hooks)) != self._pre.id:
            hooks[self._pre.id] = hooks.pop(self._pre.id)

    def _put_back(self) -> None:
        for parameter, gradient in self._hidden:
            # After a step that raised an error there may be another one by now.
            if parameter.grad is None:
                parameter.grad = gradient
        self._hidden = []

    def _groups(self, optimizer: torch.optim.Optimizer) -> "tuple[list[_Group], list[Shard]] | str":
        """Return what is to be stepped, and the shards in the order of their slots; or why torch is to step."""
        if (reason := self._why_not(optimizer)) is not None:
            return reason
        groups: list[_Group] = []
        shards: list[Shard] = []
        slots = 0
        device: torch.device | None = None
        for group in optimizer.param_groups:
            tensors: list[Stepped] = []
            for parameter in group["params"]:
                if parameter.grad is None or not local_tensor(parameter).numel():
                    continue
                shard, slot, every = _shard_of(parameter), -1, 0
                if shard is not None:
                    count, every = shard.found_by_a_step
                    slot, slots = slots, slots + count
                tensor = _stepped(parameter, parameter.grad, optimizer.state[parameter], slot, every)
                if isinstance(tensor, str):
                    return tensor
                if device not in (None, tensor.parameter.device):
                    return "its parameters are on several devices"
                device = tensor.parameter.device
                if shard is not None:
                    shards.append(shard)
                tensors.append(tensor)
            if tensors:
                groups.append(_Group(tensors, _options(group, tensors[0].parameter.device)))
        return groups, shards

    def _why_not(self, optimizer: torch.optim.Optimizer) -> str | None:
        if next(reversed(optimizer._optimizer_step_pre_hooks)) != self._pre.id:
            return "a hook was registered after fuse_step; from the next step on fuse_step's is the last one"
        if getattr(optimizer, "grad_scale", None) is not None:
            return "GradScaler divides gradients in the step"
        for group in optimizer.param_groups:
            for name in ("amsgrad", "differentiable"):
                if group.get(name):
                    return f"it has {name}=True"
            if not group.get("decoupled_weight_decay", True):
                return "its weight decay is part of the gradient, as Adam's"
            if not group.get("fused"):
                return "it was made without fused=True"
        return None

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        groups: list[_Group],
        shards: list[Shard],
        clip: torch.Tensor | None,
    ) -> None:
        found_inf: torch.Tensor | None = getattr(optimizer, "found_inf", None)
        counts = [tensor.made for group in groups for tensor in group.tensors]
        if counts:
            device = counts[0].device
            found = self._found
            slots = [shard.found_by_a_step[0] for shard in shards]
            starts = [0, *itertools.accumulate(slots)]
            if found is None or found.starts != starts or found.amaxes.device != device:
                found = self._found = FoundAmaxes(starts, device)
            # A maximum is taken by atomics, from 0 on.
            found.amaxes.zero_()
            scalars = Scalars(clip, found_inf)
            # Before the kernel, which reads them for the bias corrections, as torch's does.
            torch._foreach_add_(counts, 1)
            for group in groups:
                adamw_launch.step(group.tensors, group.options, scalars, found.amaxes)
            # As in torch, a step that is skipped is not counted.
            if found_inf is not None:
                torch._foreach_sub_(counts, [found_inf] * len(counts))
            found.by_step(shards)
            if (capture := current_capture()) is not None:
                # After the call that marks the weights as changed, which the capture was given before this hook ran.
                capture.after_replay(functools.partial(found.by_replay, shards))
                capture.after_replay(functools.partial(self._set_clip, None))
                capture.keep(found)
        self._hide(optimizer)

    def _hide(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave torch's step nothing to do: it steps no parameter without a gradient."""
        self._hidden = [(p, p.grad) for p in _parameters_of(optimizer) if p.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _options(group: dict[str, Any], device: torch.device) -> Options:
    lr, (beta1, beta2) = group["lr"], group["betas"]
    if isinstance(lr, torch.Tensor):
        lr = lr.float() if lr.device == device else lr.item()
    return Options(
        lr, (float(beta1), float(beta2)), group["eps"], group["weight_decay"], bool(group["maximize"])
    )


def _stepped(
    parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], slot: int, every: int
) -> Stepped | str:
    """Return a parameter as the kernel steps it, with torch's states; or why it does not."""
    if gradient.layout is not torch.strided:
        return "a gradient is sparse"
    values = [_plain(parameter), _plain(gradient)]
    if (reason := adamw_launch.why_not_of(values)) is not None:
        return reason
    if not state:
        # What torch makes in a first step, so that either may take the next one.
        state["step"] = torch.zeros((), dtype=torch.float32, device=values[0].device)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    moments = [_plain(state[name]) for name in ("exp_avg", "exp_avg_sq")]
    count = state["step"]
    if count.device != values[0].device or count.dtype is not torch.float32:
        return "its states were made by an optimizer without fused=True"
    tensor = Stepped(values[0], values[1], moments[0], moments[1], count, slot, every)
    return adamw_launch.why_not(tensor) or tensor


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    local = local_tensor(tensor)
    return local.plain if isinstance(local, MasterWeight) else local.detach()


def _shard_of(parameter: torch.Tensor) -> Shard | None:
    """Return the shard that has the parameter's memory and amaxes that a step finds; None where there is none."""
    local = local_tensor(parameter)
    record = local.record if isinstance(local, MasterWeight) else None
    if record is None or not record.follow():
        return None
    shard = record.shard
    if shard is None or not shard.found_by_a_step[0]:
        return None
    master = shard.master
    same = master.data_ptr() == local.data_ptr() and master.numel() == local.numel()
    return shard if same else None
