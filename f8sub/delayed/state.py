"""Delayed scaling's state of a layer: amax histories and scales of x, w and dy, as plain float32 buffers.

A forward and a backward only stage amaxes, as a running maximum, so that a step's microbatches and a recomputed forward
may come in any number. The histories of all layers roll together, once per optimizer step.

A layer has the states of its weights, one for each recipe that it was run under.
"""

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from f8sub.capture import current_capture
from f8sub.errors import Float8ConfigError
from f8sub.formats import Float8Format
from f8sub.host_copy import HostCopy
from f8sub.kernels import cuda
from f8sub.kernels.scales import (
    PriorScale,
    ReduceAmax,
    Sources,
    largest_scale,
    scale_with_margin,
    smallest_scale,
)
from f8sub.recipe import OperandName, Recipe
from f8sub.recipes.delayed import DelayedScaling
from f8sub.torch_compat import TrainingState, is_metadata_inference
from f8sub.weights.conversion import Conversion
from f8sub.weights.layout import ShardLayout
from f8sub.weights.weight import local_tensor

OPERANDS: tuple[OperandName, ...] = ("x", "w", "dy")
"""The columns of every buffer."""

X, W, DY = range(3)

ALL_MEMBERS = slice(None)

_generations = itertools.count(1)


class ScalingState(TrainingState):
    """Holds what one layer knows of its tensors' past under one recipe; one column for each of x, w, dy.

    A stack of matrices, one per expert, has a past for each: one dimension more in every buffer.

    A state dict that has a layer's weight and not its histories is of a model without delayed scaling: they begin
    again.

    A compiled backward pass overwrites the buffers that its forward pass wrote to with the values from then. So what
    forward and backward write to are separate buffers: one history and one flag for each operand.

    Attributes:
        members: matrices of a stack; None for a layer that has one.
        here: which of them this rank multiplies: under expert parallelism a part, whose past every rank keeps.
        generation: another number whenever the scales may be others.
        is_known: whether the host knows that all of its scales are computed, none is 0: a cast then need not wait for
            the current amax, and compiled code computes both in one kernel, or in the one that computes the tensor.
        x_past: equal for layers that were given the very same x's, one after the other: their x has one history.
        scale: float32, (3,) or (members, 3); 0 where there is none yet.
        age: float32, the same: optimizer steps since the scale was computed.
        histories: float32, (amax_history_len,) or (amax_history_len, members) each: staging, then what was staged
            before, oldest first.
        flags: float32, () or (members,) each: 1 where NaN or infinity was met since the last roll. Not part of the
            state dict.
    """

    scale: torch.Tensor
    history_x: torch.Tensor
    age: torch.Tensor

    def __init__(self, recipe: Recipe, device: torch.device, members: int | None = None) -> None:
        super().__init__()
        self.members, self.here = members, ALL_MEMBERS
        if recipe.delayed is None:
            raise RuntimeError(f"recipe {recipe.name!r} has no delayed scaling to keep a state for")
        self.recipe = recipe
        self.scaling: DelayedScaling = recipe.delayed
        # As text: see the note on numbers in ``reference``.
        self._margins = tuple(repr(float(self.scaling.margin_of(name))) for name in OPERANDS)
        self.generation = next(_generations)
        self.x_past = 0
        self.is_known = False
        self._scale_version = 0
        # Not as inference tensors, wherever the state begins: training writes to the buffers later.
        with torch.inference_mode(mode=False):
            each = () if members is None else (members,)
            for name in ("scale", "age"):
                self.register_buffer(name, torch.zeros((*each, 3), dtype=torch.float32, device=device))
            for name in OPERANDS:
                length = self.scaling.amax_history_len
                history = torch.zeros((length, *each), dtype=torch.float32, device=device)
                # In the state dict: training goes on with the scales that it had.
                self.register_buffer(f"history_{name}", history)
                # Not in the state dict: a flag is read at the next roll, or never.
                self.register_buffer(f"non_finite_{name}", history.new_zeros(each), persistent=False)

    @property
    def histories(self) -> list[torch.Tensor]:
        """``history_x``, ``history_w``, ``history_dy``; see the class."""
        return [getattr(self, f"history_{name}") for name in OPERANDS]

    @property
    def flags(self) -> list[torch.Tensor]:
        """``non_finite_x``, ``non_finite_w``, ``non_finite_dy``; see the class."""
        return [getattr(self, f"non_finite_{name}") for name in OPERANDS]

    def prior(self, operand: int, members: slice = ALL_MEMBERS) -> PriorScale:
        """Return the scale of one column, (1, 1), or of each of these members, (members, 1), as kernels take it."""
        scale = self.scale[..., operand : operand + 1].view(-1, 1)
        if members != ALL_MEMBERS:
            scale = scale[members]
        margin = float(self._margins[operand])
        return PriorScale(scale, margin, covers=operand == W, is_known=self.is_known)

    def notice_writes(self) -> bool:
        """Return whether something else wrote to the buffers, as ``dcp.load`` does into a state dict's; True once."""
        written = self.scale._version != self._scale_version
        if written:
            self._take_loaded()
        return written

    def sources(self, *, stage: bool, frozen: bool) -> Sources:
        """Return the sources of one call of the layer, see ``_DelayedScales``; who reduces w's amax stages it."""
        return Sources(
            _DelayedScales(self, X, stage, frozen),
            _DelayedScales(self, W, False, False),
            _DelayedScales(self, DY, stage, frozen),
        )

    def stage(self, operand: int, amax: torch.Tensor) -> None:
        """Take amaxes, float32, a row of each member ``here``, into the staging row, see ``cuda.stage``."""
        name = OPERANDS[operand]
        staged, flags = getattr(self, f"history_{name}")[0], getattr(self, f"non_finite_{name}")
        if self.here != ALL_MEMBERS:
            # Rows of other ranks' experts stay 0, and get their amaxes in the reduction over all ranks.
            staged, flags = staged[self.here], flags[self.here]
        cuda.stage(amax, staged, flags)

    def reset(self) -> None:
        """Forget everything: the next step's scales are of its own amaxes."""
        with torch.no_grad():
            for buffer in self.buffers():
                buffer.zero_()
        self.mark_rolled()
        self.x_past = 0
        self._forget_known()

    def mark_rolled(self) -> None:
        """Note that the scales may be others from now on, by this module's own doing."""
        # nn.Module's own assignment takes a microsecond, and there are two for each layer in each step.
        vars(self).update(generation=next(_generations), _scale_version=self.scale._version)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "ScalingState":
        before = self.scale
        super()._apply(fn, recurse)
        # All of them move together.
        if self.scale is not before:
            self.mark_rolled()
            self._forget_known()
        return self

    @override
    def come_to(self, device: torch.device) -> None:
        before = self.scale
        super().come_to(device)
        if self.scale is not before:
            self.mark_rolled()

    def _save_to_state_dict(self, *args: Any) -> None:
        super()._save_to_state_dict(*args)
        # Who has the buffers may write to them, which compiled code does not notice unless it looks at the scales.
        self._forget_known()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if any(key.startswith(prefix) for key in state_dict):
            super()._load_from_state_dict(state_dict, prefix, *args)
            self._take_loaded()

    def _take_loaded(self) -> None:
        """Begin with the values that are in the buffers now."""
        if not self.scale.is_meta:
            kept = self.history_x, self.scale[..., X], self.age[..., X]
            self.x_past = hash(tuple(value for buffer in kept for value in buffer.flatten().tolist()))
        self.mark_rolled()
        self._forget_known()

    def _forget_known(self) -> None:
        self.is_known = False
        _scales_made.pop(self, None)


class _DelayedScales(NamedTuple):
    """Is the ``LayerSource`` of one operand of a layer with delayed scaling.

    Attributes:
        operand: index of the operand in ``OPERANDS``.
        stage: whether the call is one of training, whose amaxes count.
        frozen: whether the layer is trained through and its own weight is not. Where optimizers step no weight of a
            conversion its histories do not roll, and a scale from before would be that of other data for ever: x and
            dy of a frozen layer are scaled by their current amaxes.
    """

    state: ScalingState
    operand: int
    stage: bool
    frozen: bool
    reduce: ReduceAmax | None = None

    @property
    def key(self) -> Hashable:
        # Layers whose x's were the same ones all along have one history, so that the scale of one is theirs too.
        return self.state.recipe, self.frozen, self.state.x_past

    @property
    def generation(self) -> int:
        return self.state.generation

    def over(self, reduce: ReduceAmax) -> "_DelayedScales":
        return self._replace(reduce=reduce)

    def prior(self) -> PriorScale:
        prior = self.state.prior(self.operand, self.state.here)
        if not self.frozen:
            return prior
        return prior._replace(scale=torch.zeros_like(prior.scale), is_known=False)

    def keep(self, amax: torch.Tensor, event: int | None = None) -> None:
        if self.stage:
            self.state.stage(self.operand, amax)
            if event is not None:
                # ``event`` is one for all layers that were given this very x.
                self.state.x_past = hash((self.state.x_past, event))


def roll(states: Sequence[ScalingState], staged: torch.Tensor) -> None:
    """Compute scales from the histories and what was staged, and roll: once per optimizer step.

    Args:
        states: of any recipes, on one device.
        staged: float32, (members of all states, 3): finite amaxes since the last roll, of all ranks where they are
            shared; a state that is no stack has one member.
    """
    by_recipe = defaultdict(list)
    roll_number = next(_generations)
    for state, of_state in zip(states, staged.split(sizes_of(states)), strict=True):
        state.notice_writes()
        # Layers that had the same x's and rolled together still have one history.
        state.x_past = hash((state.x_past, roll_number))
        by_recipe[state.recipe, state.members is None].append((state, of_state))
    with torch.inference_mode(mode=False), torch.no_grad():
        for (recipe, _), members in by_recipe.items():
            of_recipe = staged if len(by_recipe) == 1 else torch.cat([of_state for _, of_state in members])
            _roll_of_recipe(recipe, [state for state, _ in members], of_recipe)
    _look_for_scales(states)


def sizes_of(states: Sequence[ScalingState]) -> list[int]:
    """Return the rows that each state has in ``roll``'s ``staged``."""
    return [1 if state.members is None else state.members for state in states]


_scales_made: weakref.WeakKeyDictionary[ScalingState, HostCopy] = weakref.WeakKeyDictionary()
"""Whether all scales of the states that rolled together are made, on its way to the host."""


def _look_for_scales(states: Sequence[ScalingState]) -> None:
    """Find out when all scales are computed, which they then are for good.

    For all at once, because compiled code is compiled again for that. Which roll finds it may not depend on how far the
    device is: code compiled for known scales may round in another order, and ranks and runs would differ. So the first
    roll waits for its answer, and later ones for that of the roll before, which the device has long passed.
    """
    if current_capture() is not None or all(state.is_known for state in states):
        return
    asked = {_scales_made.get(state) for state in states}
    copy = asked.pop() if len(asked) == 1 else None
    if copy is None:
        copy = HostCopy(_all_made(states))
        known = copy.item()
    elif not (known := copy.item()):
        copy = HostCopy(_all_made(states))
    for state in states:
        _scales_made[state] = copy
        state.is_known = known


def _all_made(states: Sequence[ScalingState]) -> torch.Tensor:
    scales = [state.scale for state in states]
    if any(state.members is not None for state in states):
        scales = [scale.flatten() for scale in scales]
    return torch.cat(scales).all()


def _roll_of_recipe(recipe: Recipe, states: list[ScalingState], staged: torch.Tensor) -> None:
    """Roll the histories of states with one recipe, all of them stacks, or none."""
    scaling, sizes = states[0].scaling, None if states[0].members is None else sizes_of(states)
    histories = [history for state in states for history in state.histories]
    scales, ages = [state.scale for state in states], [state.age for state in states]
    if sizes is None:
        # history [amax_history_len, layers, 3], scale and age [layers, 3]
        history = torch.stack(histories, 1).view(-1, len(states), 3)
        scale, age = torch.stack(scales), torch.stack(ages)
    else:
        # history [amax_history_len, members of all stacks, 3]; ``histories`` lists x, w, dy of each state in turn.
        history = torch.stack([torch.cat(histories[operand::3], 1) for operand in range(3)], -1)
        scale, age = torch.cat(scales), torch.cat(ages)
    # Row 0 is what was staged since the last roll; rolled below to the end, as the latest.
    history[0] = staged
    seen = staged > 0
    amax = _amax_of(history.flatten(1), scaling).view_as(staged)
    # 0 is no scale: what stays so below keeps the one that it has.
    made = torch.zeros_like(scale)
    # x, w and dy differ in format and margin: e4m3 and e5m2 have other largest values.
    for (format, margin), columns in _columns_by_format(recipe, scaling).items():
        # Not indexed by a list: a copy of that to a GPU is waited for.
        of_format = [torch.stack([each[:, column] for column in columns], 1) for each in (amax, scale)]
        of_columns = _scale_of(of_format[0], of_format[1], format, margin, scaling)
        for column, of_column in zip(columns, of_columns.unbind(1), strict=True):
            made[:, column] = of_column
    # A scale is computed every ``interval`` steps, or as soon as there is an amax for the first one.
    due = (age + 1 >= scaling.interval) | (scale == 0)
    scale = torch.where(seen & due & (made > 0), made, scale)
    age = torch.where(seen, torch.where(due, 0.0, age + 1), age)
    # What staged nothing, such as an expert without tokens, keeps its history: 0 is no amax.
    rolled = torch.where(seen, history.roll(-1, 0), history)
    rolled[0] = 0.0
    if sizes is None:
        # In place: the buffers are a state dict's, a compiled graph's and a CUDA graph's.
        torch._foreach_copy_(histories, list(rolled.flatten(1).unbind(1)))
    else:
        for operand, of_operand in enumerate(rolled.unbind(-1)):
            torch._foreach_copy_(histories[operand::3], list(of_operand.split(sizes, 1)))
    for kept, values in ((scales, scale), (ages, age)):
        torch._foreach_copy_(kept, list(values.unbind() if sizes is None else values.split(sizes)))
    torch._foreach_zero_([flag for state in states for flag in state.flags])
    for state in states:
        state.mark_rolled()


def _amax_of(history: torch.Tensor, scaling: DelayedScaling) -> torch.Tensor:
    if callable(scaling.amax_compute_algo):
        return _checked(scaling.amax_compute_algo(history), history[0], "amax_compute_algo")
    return history.amax(0) if scaling.amax_compute_algo == "max" else history[0]


def _scale_of(
    amax: torch.Tensor, scale: torch.Tensor, format: Float8Format, margin: float, scaling: DelayedScaling
) -> torch.Tensor:
    if scaling.scaling_factor_compute_algo is None:
        usable = amax.isfinite() & (amax > 0)
        # 0 is no scale: the state keeps the one that it has.
        return torch.where(usable, scale_with_margin(amax, format, margin), 0.0)
    flat = amax.flatten(), scale.flatten()
    # A user's own rule, called with float32 amaxes and scales of all layers at once, as Transformer Engine does.
    made = scaling.scaling_factor_compute_algo(*flat, format.max, scaling)
    made = _checked(made, flat[0], "scaling_factor_compute_algo").view_as(amax)
    usable = made.isfinite() & (made > 0)
    return torch.where(usable, made.clamp(smallest_scale(), largest_scale()), 0.0)


def _checked(made: Any, like: torch.Tensor, algorithm: str) -> torch.Tensor:
    if not isinstance(made, torch.Tensor) or made.shape != like.shape:
        found = f"shape {tuple(made.shape)}" if isinstance(made, torch.Tensor) else type(made).__name__
        raise Float8ConfigError(
            f"{algorithm} was given {like.numel()} tensors' worth of amaxes and returned {found}; return a tensor of "
            f"shape {tuple(like.shape)}"
        )
    return made.to(like)


def _columns_by_format(
    recipe: Recipe, scaling: DelayedScaling
) -> dict[tuple[Float8Format, float], list[int]]:
    columns = defaultdict(list)
    for column, operand in enumerate(OPERANDS):
        row, col = recipe.formats(operand)
        if format := row or col:
            columns[format, scaling.margin_of(operand)].append(column)
    return columns


STATES = "scaling_states"
"""Name of the states in their layer, and so in its state dict; behind a weight's name where there are several."""


class ScalingStates(torch.nn.ModuleList):
    """The states of one layer, one for each recipe; ``fqn`` is the layer's name."""

    def __init__(self, states: Iterable[ScalingState] = (), fqn: str = "") -> None:
        super().__init__(states)
        self.fqn = fqn

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"{self.fqn}: its amax histories were asked for a weight, as torch's ColwiseParallel and "
                "RowwiseParallel ask all modules of a layer; delayed scaling takes Float8ColwiseParallel and "
                "Float8RowwiseParallel of f8sub.tensor_parallel"
            )
        return super().__getattr__(name)


def _place_of(layer: torch.nn.Module, name: str) -> str:
    """Return the name under which a layer has the states of the weight ``name``.

    Checkpoints have it. Where the layer's own class has something by that name, it is another one.
    """
    place = STATES if name == "weight" else f"{name}_{STATES}"
    if isinstance(layer._modules.get(place), ScalingStates) or not hasattr(layer, place):
        return place
    return f"_f8sub_{place}"


def states_of(layer: torch.nn.Module, name: str = "weight") -> list[ScalingState]:
    """Return the states of all recipes with delayed scaling that a weight of the layer was run under."""
    return list(layer._modules.get(_place_of(layer, name)) or ())  # type: ignore[arg-type]


def state_of(layer: Any, recipe: Recipe, name: str = "weight") -> ScalingState:
    """Return the state of a recipe with delayed scaling, begun at its first use; recipes that differ share none."""
    states = states_of(layer, name)
    for state in states:
        if state.recipe == recipe:
            return state
    if torch.compiler.is_compiling():
        raise Float8ConfigError(
            f"{layer._f8sub.fqn}: recipe {recipe.name!r} keeps amax histories, and the layer has none for it yet; run "
            "it once in the same context before torch.compile"
        )
    weight = local_tensor(getattr(layer, name))
    members = len(weight) if weight.dim() == 3 else None
    state = ScalingState(recipe, weight.device, members).train(layer.training)
    # A submodule, so that state dicts and ``model.to`` take it along.
    setattr(layer, _place_of(layer, name), ScalingStates([*states, state], layer._f8sub.fqn))
    # From here on optimizers' steps are counted, which costs each of them a walk over its parameters.
    Conversion.counts_steps = True
    return state


def forget(layer: torch.nn.Module) -> None:
    """Remove all states of the layer's weights."""
    for place in places_of(layer):
        del layer._modules[place]


def places_of(layer: torch.nn.Module) -> list[str]:
    """Return the names under which a layer has states."""
    return [place for place, module in layer._modules.items() if isinstance(module, ScalingStates)]


def forget_missing(layer: torch.nn.Module, name: str, state_dict: dict[str, Any], prefix: str) -> None:
    """Begin histories again that a state dict with the weight lacks."""
    for index, state in enumerate(states_of(layer, name)):
        kept = any(key.startswith(f"{prefix}{_place_of(layer, name)}.{index}.") for key in state_dict)
        if f"{prefix}{name}" in state_dict and not kept:
            state.reset()


def take_part(state: ScalingState, layout: ShardLayout) -> None:
    """Have a stack's state scale the experts that FSDP2 gathers on this rank.

    Its amaxes are reduced over all ranks of the mesh, those of expert parallelism too, so that every rank has the past
    of every expert, and a checkpoint of any rank all of it.
    """
    if state.members is not None:
        rows = layout.whole[0] // state.members
        first, count = layout.origin[0] // rows, layout.shape[0] // rows
        state.here = ALL_MEMBERS if count == state.members else slice(first, first + count)


def check_members(state: ScalingState, experts: int, fqn: str) -> None:
    """Raise a Float8ConfigError where this rank has other experts than the state scales."""
    if (known := len(range(state.members or 0)[state.here])) != experts:
        raise Float8ConfigError(
            f"{fqn}: delayed scaling knows {known} experts of this rank, which has {experts}: where expert parallelism "
            "alone cuts the weight, no reduction brings together the amax histories of all ranks. Call fully_shard "
            "over a mesh that has a dimension for expert parallelism, too, or take a recipe with current scaling"
        )


def delayed_sources_of(layer: Any, recipe: Recipe, name: str = "weight") -> Sources:
    """Return the sources of a weight's state; amaxes of a forward in training count."""
    state = state_of(layer, recipe, name)
    # Amaxes of evaluation are no part of the history.
    stage = torch.is_grad_enabled() and layer.training
    if not torch.compiler.is_compiling():
        state.notice_writes()
        stage = stage and not is_metadata_inference()
    weight = getattr(layer, name)
    if state.members is not None:
        check_members(state, len(local_tensor(weight)), f"{layer._f8sub.fqn}.{name}")
    frozen = layer.training and not weight.requires_grad
    return state.sources(stage=stage, frozen=frozen)
