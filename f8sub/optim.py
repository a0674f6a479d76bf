"""MasterWeights: an optimizer's float32 masters of weights that the model holds in fewer bits."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from f8sub.convert.primary_weights import is_primary, reread_shards, take_master
from f8sub.errors import Float8ConfigError
from f8sub.weights.fused_step import FusedStep
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.primary_weight import like_sharded
from f8sub.weights.weight import exported, local_tensor, master_of, refuse_gathered, replaced_by_plain

if TYPE_CHECKING:
    from f8sub.weights.conversion import Conversion

__all__ = ["MasterWeights", "fuse_step"]

MASTER = "master"
"""Name of the master among the states of its parameter."""

_MODES = ("train", "eval")
"""Methods by which an optimizer exchanges the weights that it trains and those that are evaluated.

Source: schedulefree, and what transformers' Trainer and accelerate look for.
"""


class MasterWeights(torch.optim.Optimizer):
    """Any optimizer, stepping float32 masters of the model's bfloat16, float16 and float8 primary weights.

        optimizer = f8sub.optim.MasterWeights(torch.optim.AdamW(model.parameters(), lr=3e-4))

    Construct it after ``fully_shard`` and, where a model is initialized on meta, after its initialization. Gradients
    stay on the model's parameters, where ``clip_grad_norm_`` and ``GradScaler`` look for them. Options such as lr are
    read from this optimizer's ``param_groups``, which LR schedulers write to.

    A weight that is frozen has no master. It gets one in the first step after it was unfrozen.

    A master is a weight's value, to the bit, with more digits: where the weight no longer is its master rounded,
    because a state dict was loaded or somebody wrote to it, the master takes the weight's value before the next step.

    Attributes:
        optimizer: the wrapped optimizer; its parameters are the masters.
        takes_masters: shows the hook of all optimizers that a primary weight without a master gets one in the step.
    """

    takes_masters = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, MasterWeights):
            raise Float8ConfigError(
                f"MasterWeights wraps an optimizer of the model's parameters, got {type(optimizer).__name__}; "
                "f8sub.optim.MasterWeights(torch.optim.AdamW(model.parameters(), lr=...))"
            )
        # Before masters are taken of values that FSDP2 frees.
        refuse_gathered("MasterWeights", optimizer)
        self.optimizer = optimizer
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        super().__init__(groups, dict(optimizer.defaults))
        self._masters: dict[torch.Tensor, torch.nn.Parameter] = {}
        self._frozen: dict[torch.Tensor, None] = {}
        for group in optimizer.param_groups:
            group["params"][:] = self._take(group["params"])  # in place: LBFGS remembers the list

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """States by parameter of the model, the master among them; empty before the first step, as torch's."""
        states = self.optimizer.state
        found: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for weight, master in self._pairs() if states else ():
            found[weight] = dict(states.get(master, {}))
            if master is not weight:
                found[weight][MASTER] = master
        return found

    @state.setter
    def state(self, value: Any) -> None:
        """Torch's constructor makes one; the states are the wrapped optimizer's."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer, with masters for the weights that need them."""
        super().add_param_group(param_group)
        if len(self.param_groups) > len(self.optimizer.param_groups):  # not while it is constructed
            group = self.param_groups[-1]
            self.optimizer.add_param_group({**group, "params": self._take(group["params"])})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the wrapped optimizer on the masters, and the weights rounded from them.

        The float8 codes are cast with fresh scales at the next forward; ``precompute_scales(model)`` starts their one
        all-reduce before.

        Raises:
            Float8ConfigError: a weight was replaced by a tensor that this optimizer's master is not the master of; or
                a primary weight was unfrozen, and something holds on to it as it is.
        """
        self._take_unfrozen()
        self._pass_options(self.param_groups, self.optimizer.param_groups)
        self._follow_weights()
        self._pass_gradients()
        evaluate = None if closure is None else lambda: self._evaluate(closure)
        loss = self.optimizer.step(evaluate)
        # They take twice the memory of bfloat16 gradients: none outlives the step.
        for master in self._masters.values():
            master.grad = None
        self._round()
        self._pass_options(self.optimizer.param_groups, self.param_groups)
        return loss

    def __getattr__(self, name: str) -> Any:
        """Return ``train`` and ``eval`` of a wrapped optimizer that has them, such as a schedule-free one."""
        # Only then: trainers call what they find. The wrapped optimizer is missing while torch's constructor runs.
        if name in _MODES and callable(getattr(self.__dict__.get("optimizer"), name, None)):
            return functools.partial(self._switch, name)
        return object.__getattribute__(self, name)  # Python's own error

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        """Have the wrapped optimizer put other values into the masters, and round the weights from them."""
        self._take_unfrozen()
        self._pass_options(self.param_groups, self.optimizer.param_groups)
        self._follow_weights()
        getattr(self.optimizer, mode)()
        # The weights of the other mode; the masters of primary weights have them already.
        self._round()
        self._pass_options(self.optimizer.param_groups, self.param_groups)
        for conversion in conversions_of(self._masters):
            conversion.changes += 1

    def __getstate__(self) -> dict[str, Any]:
        """Refused: a copy's weights would not be those that the copied masters are of."""
        raise Float8ConfigError(
            "MasterWeights cannot be copied or pickled: copy the model, construct MasterWeights(optimizer) over the "
            "copy's parameters, and hand it this one's state_dict()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as any optimizer does; the masters have no gradient outside of a step."""
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, with each weight's float32 master as one more state of its parameter."""
        self._pass_options(self.param_groups, self.optimizer.param_groups)
        packed = self.optimizer.state_dict()
        state = {index: dict(entries) for index, entries in packed["state"].items()}
        for index, (weight, master) in enumerate(self._pairs()):
            if master is not weight:
                state.setdefault(index, {})[MASTER] = exported(master)
        return {**packed, "state": dict(sorted(state.items()))}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned; of an optimizer without masters, the masters stay the model's values."""
        # Numbers, or names where torch.distributed.checkpoint made the dict.
        names = list(itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        state = {}
        has_master = [MASTER in state_dict["state"].get(name, ()) for name in names]
        saved = itertools.compress((weight for weight, _ in self._pairs()), has_master)
        self._replace([weight for weight in saved if weight in self._frozen])
        for name, (weight, master) in zip(names, self._pairs(), strict=True):
            entries = dict(state_dict["state"].get(name, {}))
            saved = entries.pop(MASTER, None)
            if saved is not None and master is not weight:
                master.copy_(saved)
            if entries:
                state[name] = entries
        self.optimizer.load_state_dict({**state_dict, "state": state})
        self._pass_options(self.optimizer.param_groups, self.param_groups)
        self._round()
        for conversion in conversions_of(self._masters):
            conversion.changes += 1

    def _take_unfrozen(self) -> None:
        """Make the masters of weights that have begun to learn."""
        self._replace([weight for weight in self._frozen if weight.requires_grad])

    def _replace(self, weights: list[torch.Tensor]) -> None:
        """Have the wrapped optimizer step masters of these weights, where it stepped the weights themselves."""
        for weight in weights:
            (master,) = self._take([weight], frozen=True)
            for group in self.optimizer.param_groups:
                group["params"][:] = [master if stepped is weight else stepped for stepped in group["params"]]

    def _take(self, weights: list[torch.Tensor], *, frozen: bool = False) -> list[torch.Tensor]:
        """Return what the wrapped optimizer steps instead of ``weights``; itself for a frozen one, unless taken."""
        taken = [self._take_one(weight, frozen) for weight in weights]
        for conversion in conversions_of(taken):
            reread_shards(record.module for record in conversion)
            conversion.changes += 1  # the masters' storages are new
        return taken

    def _take_one(self, weight: torch.Tensor, frozen: bool) -> torch.Tensor:
        if not (is_primary(weight) or _has_fewer_bits(weight)):
            return weight
        if not (weight.requires_grad or frozen):
            self._frozen[weight] = None
            return weight
        if is_primary(weight):
            master = take_master(weight)
        else:
            master = torch.nn.Parameter(like_sharded(_plain(weight).to(torch.float32, copy=True), weight))
        self._masters[weight] = master
        self._frozen.pop(weight, None)
        # The optimizer may have stepped the weight before it was wrapped: its states go to the master.
        if weight in self.optimizer.state:
            state = self.optimizer.state.pop(weight)
            self.optimizer.state[master] = {
                name: value.to(master.dtype) if getattr(value, "dtype", None) == weight.dtype else value
                for name, value in state.items()
            }
        return master

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(the model's weight, what the wrapped optimizer steps), in the order that state dicts number them."""
        for mine, theirs in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            yield from zip(mine["params"], theirs["params"], strict=True)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """A closure of the wrapped optimizer: the loss at what the masters are now, and its gradients."""
        self._round()
        with torch.enable_grad():
            loss = closure()
        self._pass_gradients()
        return loss

    def _pass_gradients(self) -> None:
        for weight, master in self._masters.items():
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype)

    def _follow_weights(self) -> None:
        """Take what was written to the weights since they were rounded; see the class."""
        for weight, master in self._masters.items():
            local, values = local_tensor(weight), local_tensor(master)
            if isinstance(values, MasterWeight):
                if master_of(local) is not values:
                    raise _no_longer_primary(f"a weight of shape {tuple(weight.shape)}")
                continue
            now = _plain(local)
            values.copy_(torch.where(now == values.to(now.dtype), values, now.to(values.dtype)))

        for conversion in conversions_of(self._masters):
            if (record := replaced_by_plain(conversion)) is not None:
                raise _no_longer_primary(f"{record.fqn}.{record.name}")

    @torch.no_grad()
    def _round(self) -> None:
        """Write the masters to the weights that are copies of them; float8 codes are cast when they are needed."""
        rounded = [(weight, master) for weight, master in self._masters.items() if not is_primary(weight)]
        if rounded:
            weights, masters = zip(*rounded, strict=True)
            torch._foreach_copy_([local_tensor(w) for w in weights], [local_tensor(m) for m in masters])

    @staticmethod
    def _pass_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        for mine, theirs in zip(source, target, strict=True):
            theirs.update({name: value for name, value in mine.items() if name != "params"})


def fuse_step(optimizer: torch.optim.Optimizer) -> FusedStep:
    """Have ``optimizer.step()`` clip, step, and take the amaxes of the new weights in one pass over their memory.

        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        fused = f8sub.optim.fuse_step(optimizer)
        ...
        norm = fused.clip_grad_norm_(1.0)
        optimizer.step()
        f8sub.precompute_scales(model)

    Call it after ``fully_shard``. On NVIDIA's GPUs a Triton kernel then takes the steps, with the numbers of torch's
    fused kernel. ``clip_grad_norm_`` of what is returned reads the gradients once, for their norm, where torch's reads
    and writes them once more. ``precompute_scales`` takes the amaxes that the step found, and reads the weights only
    where something wrote to them since, where their scales are of rows or blocks, or in a CUDA graph of your own. In
    ``f8sub.graph_step`` the function calls ``clip_grad_norm_``, and all of this is in the graph.

    States and state dicts are torch's own. Whatever the kernel does not take is stepped by torch, as before:
    ``FusedStep.why_torch`` says why. That are closures, ``amsgrad``, ``GradScaler``, other devices and, once, a hook
    that was registered later.

    Args:
        optimizer: a ``torch.optim.AdamW`` with ``fused=True``, or ``MasterWeights`` of one.

    Raises:
        Float8ConfigError: another optimizer, or one that was given before.
    """
    stepped = optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer
    if not isinstance(stepped, torch.optim.AdamW):
        raise Float8ConfigError(
            f"fuse_step takes torch.optim.AdamW, or MasterWeights of one, got {type(stepped).__name__}"
        )
    refuse_gathered("fuse_step", optimizer)
    if stepped in FusedStep.optimizers:
        raise Float8ConfigError(
            f"fuse_step was called for this {type(stepped).__name__} before; keep what it returned, or call remove() "
            "on that first"
        )
    return FusedStep(stepped, optimizer)


def _no_longer_primary(weight: str) -> Float8ConfigError:
    return Float8ConfigError(
        f"{weight} no longer is the float8 weight whose master MasterWeights steps: it was replaced by assignment, "
        "model.to(dtype) or to_empty, or its master was dropped; do that first, then construct MasterWeights"
    )


def _has_fewer_bits(weight: torch.Tensor) -> bool:
    return weight.is_floating_point() and weight.dtype.itemsize < torch.float32.itemsize


def _plain(weight: torch.Tensor) -> torch.Tensor:
    local = local_tensor(weight)
    return local.plain if isinstance(local, MasterWeight) else local.detach()


def conversions_of(weights: Iterable[torch.Tensor]) -> "set[Conversion]":
    """The conversions that the master weights among ``weights`` belong to."""
    masters = [master_of(local_tensor(weight)) for weight in weights]
    records = [master.record for master in masters if master is not None and master.record is not None]
    return {conversion for record in records if (conversion := record.conversion) is not None}
