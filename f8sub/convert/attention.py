"""attend_in_float8: attention modules whose scaled_dot_product_attention runs in float8 from now on.

[Note] A module that calls ``scaled_dot_product_attention`` gets a child that holds its state, and a class of its own
whose forward runs under a mode that sends these calls through the state. Modules of transformers call it by way of a
table of functions, so there the mode is around that function alone, and their class stays. A mode is entered inside of
the module's forward, so it is there again wherever forward is repeated: in checkpointing and in compiled code.

[Note: shared histories] Ranks that hold the same modules have one history: a maximum over them per optimizer step.

    this rank's backward passes --> history --maximum over the ranks--> the same history on all of them

So any rank's copy is the one to save, and to resume from on any number of ranks. An amax that another rank met errs
upward, which costs nothing. A converted layer near the attention says which ranks hold it, and in a model that has
none any other parameter near it:

- FSDP2 gathers its weight as float8, or it has delayed scaling: the exchange of its weight takes the histories along.
- Other sharded weights, those of tensor parallelism alone too: an all-reduce of the histories' own.
- DDP: the same, over its ranks. It broadcasts rank 0's buffers at every forward, and leaves these alone from then on.

A step of any optimizer that has parameters of the model counts: the layers may be frozen, and adapters be trained.
"""

import functools
import inspect
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parameter import is_lazy
from typing_extensions import override

from f8sub.attention import cudnn
from f8sub.attention.state import (
    AUTO,
    BACKENDS,
    BACKWARDS_BY_NAME,
    CHILD,
    CUDNN,
    MIN_LENGTH,
    REFERENCE,
    SDPA,
    AttentionState,
    InFloat8,
)
from f8sub.capture import current_capture
from f8sub.convert.checks import refuse_sharded
from f8sub.convert.patterns import matches
from f8sub.delayed.rolling import Replicas
from f8sub.errors import Float8ConfigError, Float8Warning, refuse_other_than_a_module, unknown
from f8sub.torch_compat import (
    TrainingState,
    change_and_restore,
    constant_result,
    graph_task,
    remove_hook,
    running_ddp,
    states_follow_parameters,
)
from f8sub.weights.conversion import Conversion, Guest, LayerGuest, Members, ParamDtypes
from f8sub.weights.precompute_scales import watch_writes
from f8sub.weights.weight import BESIDE, STATE, Anchor, WeightRecord, is_converted

if TYPE_CHECKING:
    from f8sub.weights.exchange import Exchange

TABLE = "ALL_ATTENTION_FUNCTIONS"
"""Transformers' table of attention functions, in ``modeling_utils``."""

WITHOUT_MASK = "sdpa_without_mask"
"""The entry of that table which ``f8sub.integrations.transformers.attend_causally`` makes. Transformers makes no mask
for it, because none is registered for it."""

CALLS = {"scaled_dot_product_attention", TABLE}
"""Names of which the code of a module's own methods has one, where the module calls attention."""

NOT_CALLERS = ("torch.", "f8sub.", "transformers.modeling_utils")
"""Modules of Python whose classes call no attention themselves."""


class AttentionModule(NamedTuple):
    """A module that calls attention.

    Attributes:
        fqn: its name in the model.
        state: what ``attend_in_float8`` gave it; None where it was not called for the module.
        reason: why it stays in high precision; None where its last call did not, "" where nothing is known yet.
    """

    fqn: str
    state: AttentionState | None
    reason: str | None

    @property
    def converted(self) -> bool:
        """Whether attention is in float8 there, as far as it is known."""
        return not self.reason

    @property
    def how(self) -> str:
        """Kernels and the format of backward, and whether a call was seen; empty where it stays in high precision.

        Reads from the device whether there was a backward pass: compiled calls show by that alone.
        """
        if self.state is None or self.reason:
            return ""
        line = f"{REFERENCE if self.state.backend == REFERENCE else CUDNN}, backward in {self.state.backward}"
        return line if self.reason is None or self.state.was_trained else f"{line}, no call seen yet"

    @property
    def title(self) -> str:
        """A sentence that says what became of it. Reads from the device how often gradients saturated."""
        if self.state is None or self.reason:
            return f"not in float8: {self.reason}"
        saturated = [f"{name} {count}" for name, count in self.state.saturations.items() if count]
        told = f"; backwards that saturated: {', '.join(saturated)}" if saturated else ""
        return f"in float8: {self.how}{told}"


def attend_in_float8(
    model: torch.nn.Module,
    *,
    backward: str = "float8",
    skip: str | Sequence[str] = (),
    min_length: int = MIN_LENGTH,
    backend: str = AUTO,
) -> list[str]:
    """Run ``scaled_dot_product_attention`` in float8 from now on, in the modules of a model that call it; in place.

    Call it before ``torch.compile`` and ``fully_shard``, before or after ``convert_to_float8``. It changes numbers:
    q, k, v, the probabilities and o are e4m3, with one scale each; docs/attention.md says by how much, and when it
    gains time. cuDNN's kernels take causal and full attention of bf16 and float16, grouped heads, and head dim 128;
    with ``backward="bf16"`` all multiples of 16 up to 256. What they do not take stays as it was: masks, dropout, short
    sequences, DTensors, other GPUs. ``conversion_report`` says so of each module.

    Needs the package nvidia-cudnn-frontend (1.23.0 is known to work) on Hopper or newer.

    What backward remembers is in the state dict, and not in what ``save_pretrained`` of transformers writes.

    Args:
        model: any module, not sharded yet. Of transformers, those with ``attn_implementation="sdpa"``; of others,
            modules whose own code calls ``scaled_dot_product_attention``.
        backward: "float8": dO, dP, dq, dk and dv are e4m3, too, with scales from earlier backwards, which are in the
            state dict. "bf16": of the q, k and v that forward rounded, without a state.
        skip: glob patterns over whole segments of a module's name; a match stays as it was.
        min_length: tokens; attention over fewer stays as it was, because float8 is slower there.
        backend: "auto" takes cuDNN's kernels where they are; "cudnn" raises where they are not; "reference" is the
            same arithmetic on any device, for tests, many times slower.

    Returns:
        The names of the modules.

    Raises:
        Float8ConfigError: an unknown option, no module calls attention, a model that is sharded already, or
            ``backend="cudnn"`` where there is none.
    """
    refuse_other_than_a_module("attend_in_float8", model)
    if backward not in BACKWARDS_BY_NAME:
        raise unknown("backward", backward, BACKWARDS_BY_NAME)
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    refuse_sharded(model, "call attend_in_float8 before fully_shard and parallelize_module")
    device = _device_of(model)
    if backend == CUDNN and (reason := cudnn.why_not(device)) is not None:
        raise Float8ConfigError(f"attend_in_float8: backend='cudnn' {reason}")
    patterns = [skip] if isinstance(skip, str) else list(skip)
    callers = {fqn: module for fqn, module in model.named_modules() if calls_attention(_class_of(module))}
    idle = [pattern for pattern in patterns if not any(matches(pattern, fqn) for fqn in callers)]
    if idle:
        warnings.warn(
            f"skip={idle} of attend_in_float8 match no attention module", Float8Warning, stacklevel=2
        )
    chosen = [fqn for fqn in callers if not any(matches(pattern, fqn) for pattern in patterns)]
    if not chosen:
        raise Float8ConfigError(
            "attend_in_float8 found no module whose code calls scaled_dot_product_attention "
            f"({'skip= leaves none' if callers else 'flex, flash and own kernels are not taken'}); move the call into "
            "the forward of a module of the model"
        )
    new = [fqn for fqn in chosen if not isinstance(callers[fqn]._modules.get(CHILD), AttentionState)]
    # All that can be refused is, so an error leaves the model as it was.
    for fqn in chosen:
        _convert(callers[fqn], AttentionState(fqn, BACKWARDS_BY_NAME[backward], backend, min_length, device))
    # Compiled attention cannot leave meta in its first call, as it does in eager.
    for part in dict.fromkeys(part for fqn in new for part in _parts_around(f"{fqn}.{CHILD}")):
        loaded = model.get_submodule(part.removesuffix("."))
        loaded.register_load_state_dict_post_hook(states_follow_parameters)
    share_histories(model)
    leave_out_of_exports(model)
    return chosen


def histories_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a model's state dict has of training besides weights, delayed scaling's too, by name."""
    return {
        f"{fqn}.{name}": buffer
        for fqn, state in model.named_modules()
        if isinstance(state, TrainingState)
        for name, buffer in state.named_buffers(recurse=False)
        if name not in state._non_persistent_buffers_set
    }


class _LeftOut(set[str]):
    """Names that ``save_pretrained`` leaves out, of a model whose state dicts bring them up to date."""


def leave_out_of_exports(model: torch.nn.Module) -> None:
    """Have ``save_pretrained`` write no histories, which readers of weights do not know; ``state_dict`` has them."""
    of_transformers: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    module: Any
    for module in model.modules():
        if not isinstance(module, of_transformers):
            continue
        if not isinstance(module._keys_to_ignore_on_save, _LeftOut):
            module._keys_to_ignore_on_save = _LeftOut(module._keys_to_ignore_on_save or ())
            # A context of ``autocast`` begins histories later.
            module.register_state_dict_pre_hook(_leave_out)
        _leave_out(module)


def _leave_out(module: Any, *_: Any) -> None:
    module._keys_to_ignore_on_save |= histories_of(module).keys()


def attention_modules(model: torch.nn.Module) -> list[AttentionModule]:
    """Return the modules that call attention, and why those that were not converted stay as they are."""
    found = []
    for fqn, module in model.named_modules():
        if not calls_attention(_class_of(module)):
            continue
        state = module._modules.get(CHILD)
        if not isinstance(state, AttentionState):
            found.append(AttentionModule(fqn, None, "attend_in_float8 has not been called for it"))
        else:
            found.append(AttentionModule(fqn, state, state.reason or _why_never(module, state)))
    return found


def _why_never(module: Any, state: AttentionState) -> str | None:
    """Return why no call of a module can be in float8, as far as it is known before one."""
    # Of a model of another library there is no such name.
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")
    if implementation not in ("sdpa", WITHOUT_MASK):
        return f"attn_implementation={implementation!r}: attention in float8 takes 'sdpa'"
    # Until it ran it is not known on which device it will.
    if state.backend == AUTO and (reason := cudnn.why_not(state.history.device)) is not None:
        return reason
    return state.reason


def revert_attention(module: torch.nn.Module) -> None:
    """Give a module back the class that it had, without a state; nothing where it has none."""
    module.__dict__.pop(BESIDE, None)
    # Modules of transformers kept their class.
    if isinstance(module._modules.get(CHILD), AttentionState):
        del module._modules[CHILD]
        if isinstance(module, _InFloat8):
            module.__class__ = type(module).__bases__[1]


@functools.cache
def calls_attention(cls: Any) -> bool:
    """Return whether the code of a class calls ``scaled_dot_product_attention``, or transformers' table of it."""
    for base in cls.__mro__:
        # What torch's own modules do inside of torch no mode sees; transformers' base class of models has the table.
        if base is object or base.__module__.startswith(NOT_CALLERS):
            continue
        if any(CALLS & _names_in(member) for member in vars(base).values()):
            return True
    return False


def _class_of(module: torch.nn.Module) -> Any:
    return type(module)


def _names_in(member: Any) -> set[str]:
    """Return the names that a method's code has, with that of functions in it; none of what is no function."""
    function = inspect.unwrap(member) if inspect.isfunction(member) else None
    # From the code and not the source, which typed-in classes have none of.
    codes = [function.__code__] if inspect.isfunction(function) else []
    found: set[str] = set()
    while codes:
        code = codes.pop()
        found |= set(code.co_names)
        # Comprehensions and lambdas are constants of the code around them.
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found


def _device_of(model: torch.nn.Module) -> torch.device:
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


def _convert(module: torch.nn.Module, state: AttentionState) -> None:
    is_converted = isinstance(module._modules.get(CHILD), AttentionState)
    # Past the module's own ``__setattr__``, which libraries replace.
    module._modules[CHILD] = state
    if is_converted:
        return
    # Not imported for its own sake: a model of transformers imported it.
    table = getattr(sys.modules.get("transformers.modeling_utils"), TABLE, None)
    if table is not None and _reads_table(_class_of(module)):
        _enter_in_table(table)
    else:
        module.__class__ = _class_in_float8(_class_of(module))


@functools.cache
def _reads_table(cls: Any) -> bool:
    return any(TABLE in _names_in(member) for base in cls.__mro__ for member in vars(base).values())


def _enter_in_table(table: Any) -> None:
    """Have transformers' function look for a state; without one it does what it did."""
    # One entry for all models of the process, so that configs, masks and checkpoints go by the name "sdpa" as before.
    known = table["sdpa"]
    if not getattr(known, "is_of_f8sub", False):
        table.register("sdpa", by_state(known))


def by_state(known: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function of transformers that sends the calls of modules with a state through it."""

    @functools.wraps(known)
    def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = module._modules.get(CHILD)
        if state is None:
            return known(module, *args, **kwargs)
        return _in_mode(state, known, module, *args, **kwargs)

    attention.is_of_f8sub = True  # type: ignore[attr-defined]
    return attention


def _in_mode(state: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function in whose calls of attention a state decides."""
    if torch.compiler.is_compiling():
        return change_and_restore(_replaced, state, function, args, kwargs)
    # Entered in each forward, so that threads and repeated forwards need nothing else.
    with InFloat8(state):
        return function(*args, **kwargs)


def _replaced(state: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do the same while dynamo traces, for which a mode is in the way of tensors' methods that are in Python."""
    # Context parallelism has its own in this place, by which ranks attend to each other's tokens.
    if F.scaled_dot_product_attention is not SDPA:
        return function(*args, **kwargs)
    F.scaled_dot_product_attention = state.attend
    try:
        return function(*args, **kwargs)
    finally:
        F.scaled_dot_product_attention = SDPA


class _InFloat8(torch.nn.Module):
    """Goes before a module's class, whose forward it calls."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _in_mode(self._modules[CHILD], super().forward, *args, **kwargs)


@functools.cache
def _class_in_float8(cls: Any) -> type[torch.nn.Module]:
    """Return the class that modules of ``cls`` turn into; one for each, because dynamo guards on classes."""
    members = {"__module__": cls.__module__, "__reduce_ex__": _reduce}
    return type(f"{cls.__name__}InFloat8", (_InFloat8, cls), members)


def _reduce(module: torch.nn.Module, protocol: Any) -> Any:
    """Have copies and pickles name the class that was converted: the other one has no name to be found by."""
    return _new_module, (type(module).__bases__[1],), module.__getstate__()


def _new_module(cls: type[torch.nn.Module]) -> torch.nn.Module:
    kind: Any = cls
    both = _class_in_float8(kind)
    return both.__new__(both)


def _joined(states: Iterable[AttentionState]) -> torch.Tensor:
    """Return a copy of the histories: float32, (states, HISTORY, 4)."""
    return torch.stack([state.history for state in states])


def _raise_to(states: Sequence[AttentionState], maxima: torch.Tensor) -> None:
    """Write maxima over the ranks to the histories, in place."""
    # A backward pass may have rolled since the maxima were asked for. What it noted is not overwritten.
    found = torch.maximum(_joined(states), maxima.view(len(states), *states[0].history.shape))
    torch._foreach_copy_([state.history for state in states], list(found.unbind()))


def _states_of(record: WeightRecord) -> Sequence[AttentionState]:
    """Return the states of the attention near a weight."""
    module = record.module
    anchor: Any = None if module is None else module.__dict__.get(BESIDE, module.__dict__.get(STATE))
    return () if anchor is None else anchor.attends


class _Riding:
    """Is the ``Region`` of the histories whose layers' weights are in one exchange."""

    def __init__(
        self, guest: "SharedAttention", states: Sequence[AttentionState], before: "_Riding | None"
    ) -> None:
        self.states, self.size = states, sum(state.history.numel() for state in states)
        self.covered: int = 0 if before is None else before.covered
        self.asked_at: int = -1 if before is None else before.asked_at
        self._guest = guest

    @property
    def due(self) -> bool:
        return self._guest.steps > self.covered

    def write(self, out: torch.Tensor) -> None:
        out.copy_(_joined(self.states).flatten())
        covered, self.covered = self.covered, self._guest.steps
        if (capture := current_capture()) is not None:
            # Replays run no hook, and all of them reduce: after each nothing is due.
            capture.if_it_fails(lambda: setattr(self, "covered", covered))

    def read(self, reduced: torch.Tensor, weight_amax: torch.Tensor) -> torch.Tensor:
        _raise_to(self.states, reduced)
        return reduced.new_zeros(0)

    def report(self, found: torch.Tensor) -> list[str]:
        return []


class SharedAttention(Guest):
    """Reduces the histories of attention near a conversion's weights, once per optimizer step: its ``Guest``.

    Attributes:
        steps: optimizer steps of the model so far.
    """

    def __init__(self, conversion: Conversion) -> None:
        self.steps = self._reduced_at = 0
        # A proxy, because the conversion holds its guests.
        self._conversion: Conversion = weakref.proxy(conversion)
        self._apart: dict[Exchange, list[AttentionState]] = {}
        self._replicas: Replicas | None = None

    @override
    def entered(self, members: Members, dtypes: ParamDtypes, exchange: "Exchange") -> None:
        states = [
            state for record, _ in members if not self._rides(record, dtypes) for state in _states_of(record)
        ]
        if states and len(exchange.layout.ranks) > 1:
            # Begun now, when all of the ranks are here.
            exchange.group_of(exchange.layout.ranks)
            self._apart[exchange] = states
            Conversion.counts_steps = True

    def _rides(self, record: WeightRecord, dtypes: ParamDtypes) -> bool:
        """Return whether the weight gets a shard, and so the histories near it a region."""
        is_sent = record.gathered and (record.module, record.name) in dtypes
        return is_sent or any(guest.prior_of(record) is not None for guest in self._conversion.guests)

    @override
    def region(self, records: Sequence[WeightRecord], before: Any) -> _Riding | None:
        by_name = sorted(records, key=lambda record: record.fqn)
        states = [state for record in by_name for state in _states_of(record)]
        if not states:
            return None
        # From here on optimizers' steps are counted.
        Conversion.counts_steps = True
        return _Riding(self, states, before)

    def saw_forward(self) -> bool:
        """Have DDP's ranks share histories, if it runs the model now; return whether it is known who shares them."""
        is_sharded = bool(self._apart) or len(self._conversion.exchanges) > 0
        if self._replicas is None and not is_sharded and (ddp := running_ddp()) is not None:
            states = ((n, m) for n, m in ddp.module.named_modules() if isinstance(m, AttentionState))
            buffers = [f"{name}.{buffer}" for name, state in states for buffer in state._buffers]
            self._replicas = Replicas(ddp, buffers)
            Conversion.counts_steps = True
        return is_sharded or self._replicas is not None

    @override
    def stepped(self, weights: Sequence[torch.Tensor]) -> None:
        self.steps += 1
        if (capture := current_capture()) is not None:
            capture.after_replay(self._replayed)
        # Optimizers that step within backward are many in a step: precompute_scales reduces after the last of them.
        if graph_task() == -1:
            self.precompute()

    @override
    def stepped_others(self) -> None:
        # Where layers are trained, what steps them counts, and what steps the rest of the model is in the same step.
        weights = [record.parameter for record in self._conversion.records] if self._has_layers else []
        if not any(weight is not None and weight.requires_grad for weight in weights):
            self.stepped(())

    @override
    def precompute(self) -> None:
        if self._reduced_at == self.steps:
            return
        self._reduced_at = self.steps
        if not self._has_layers:
            # With ``asked``, because this rank alone may have stepped.
            self._conversion.refresh(asked=True, gathered=True)
        with torch.inference_mode(mode=False), torch.no_grad():
            if self._replicas is not None and (held := self._held()):
                _raise_to(held, self._replicas.maximum(_joined(held), held[0].fqn))
            for exchange, states in list(self._apart.items()):
                self._reduce_apart(exchange, states)

    @property
    def _has_layers(self) -> bool:
        return len(self._conversion.layer_guests) > 0

    def _replayed(self) -> None:
        """Note that a replay stepped, and reduced."""
        self.steps += 1
        self._reduced_at = self.steps

    def _reduce_apart(self, exchange: "Exchange", states: Sequence[AttentionState]) -> None:
        ranks = exchange.layout.ranks
        # No all-gather of float8 brings the ranks together, so they agree: one alone may have stepped.
        if current_capture() is None and not exchange.all_arrive(ranks, "attention", self.steps):
            # Their counts of steps differ from now on, and each would wait for the others at every step.
            del self._apart[exchange]
            warnings.warn(
                f"{states[0].fqn}: some ranks stepped an optimizer and others did not, so the amax histories of "
                "attention in float8 are each rank's own from now on, and a checkpoint has one rank's. Decide on all "
                "ranks together whether to step",
                Float8Warning,
                stacklevel=2,
            )
            return
        # A copy: backward passes may write to the histories while this is reduced.
        maxima = _joined(states)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=exchange.group_of(ranks).of_next_call())
        _raise_to(states, maxima)

    def _held(self) -> list[AttentionState]:
        """Return all states, in an order that every rank agrees on."""
        return [state for record in self._conversion for state in _states_of(record)]

    @override
    def before_state_dict(self) -> None:
        """Reduce what is due, if all ranks take or load a state dict now, and finish the reduction under way."""
        for exchange in self._conversion.exchanges.values():
            region = exchange.table.regions.get(self)
            if not isinstance(region, _Riding):
                continue
            # Once a step, as there is a call for every layer. On some ranks alone nobody reduces.
            if region.due and region.asked_at != self.steps:
                region.asked_at = self.steps
                if exchange.all_arrive(exchange.layout.ranks, "settle attention", self.steps):
                    exchange.reduce(report=False)
            exchange.settle()


class AttentionNearLayers(LayerGuest):
    """Finds the attention near the layers of a model that was converted."""

    @override
    def converted(self, model: torch.nn.Module, conversion: Conversion) -> None:
        share_histories(model)


def share_histories(model: torch.nn.Module) -> None:
    """Have the ranks that hold a model's attention share its histories, by the weights near it; in place.

    Those are the converted layers of the smallest part of the model that has any beside the attention. In a model
    without converted layers it is one parameter of the smallest part that has any.
    """
    modules = dict(model.named_modules())
    layers: dict[str, Any] = {fqn: module for fqn, module in modules.items() if is_converted(module)}
    for layer in layers.values():
        layer._f8sub.attends = ()
    # A call before this one may have found no layers.
    for module in modules.values():
        module.__dict__.pop(BESIDE, None)
    remove_hook(share_attention_hook, model)
    conversions: dict[Conversion, None] = {}
    alone: dict[str, AttentionState] = {}
    for fqn, state in modules.items():
        if not isinstance(state, AttentionState) or not state.has_past:
            continue
        if (layer := _nearest(fqn, layers)) is not None:
            layer._f8sub.attends = (*layer._f8sub.attends, state)
            conversions[layer._f8sub.conversion] = None
        else:
            alone[fqn] = state
    if alone:
        conversions[_anchored(model, alone)] = None
    for conversion in conversions:
        conversion.follow_steps_of(model)
        model.register_forward_pre_hook(functools.partial(share_attention_hook, conversion))


def _nearest(fqn: str, layers: dict[str, Any]) -> Any:
    """Return the converted layer in the smallest part of a model with the module ``fqn``; None where there is none."""
    for part in _parts_around(fqn):
        inside = [layer for name, layer in layers.items() if f"{name}.".startswith(part)]
        if inside:
            # One that is gathered as float8 has a reduction already.
            return next((layer for layer in inside if layer._f8sub.float8_all_gather), inside[0])
    return None


def _parts_around(fqn: str) -> Iterator[str]:
    """Yield what names begin with in each part of a model that has the module ``fqn`` in it, the smallest first."""
    while fqn:
        fqn = fqn.rpartition(".")[0]
        yield f"{fqn}." if fqn else ""


def _anchored(model: torch.nn.Module, alone: dict[str, AttentionState]) -> Conversion:
    """Return a conversion that follows a parameter near each state, and has no layers."""
    conversion = Conversion({}, (SharedAttention,))
    near: dict[str, list[AttentionState]] = defaultdict(list)
    # Lazy ones have no dimensions yet.
    parameters = {name: p for name, p in model.named_parameters() if not is_lazy(p)}
    for fqn, state in alone.items():
        for part in _parts_around(fqn):
            inside = {name: p for name, p in parameters.items() if name.startswith(part)}
            # Under tensor parallelism a matrix has more ranks than a norm has.
            if found := [name for name, p in inside.items() if p.dim() > 1] or list(inside):
                near[found[0]].append(state)
                break
    for name, states in near.items():
        owner, _, own_name = name.rpartition(".")
        module = model.get_submodule(owner)
        conversion.add(module, own_name, name, None, gathered=False)
        module.__dict__[BESIDE] = Anchor(conversion, tuple(states))
    # Scales of it may be asked for, as in training loops that do so with any model.
    Conversion.see(model)
    watch_writes()
    return conversion


@constant_result
def learn_replicas() -> bool:
    """Have DDP's ranks share histories where they compile the whole model, whose hooks run in no forward.

    While dynamo traces it is called as it is, on all ranks, because all of them begin with the same forward.
    """
    ddp = running_ddp()
    inside = set() if ddp is None else set(ddp.module.modules())
    for model, followers in Conversion.followed.items():
        for follower in followers if model in inside else ():
            if (conversion := follower()) is not None:
                conversion.guest(SharedAttention).saw_forward()
    return ddp is not None


def share_attention_hook(conversion: Conversion, module: torch.nn.Module, args: Any) -> None:
    """Find in a forward pre-hook which ranks share histories of attention; removed once that is known."""
    if torch.compiler.is_compiling():
        learn_replicas()
        return
    if not conversion.alive:
        # A copy of a model without layers, whose conversion has not seen the copies of its parameters.
        share_histories(module)
        return
    # As for a copy.
    conversion.follow_steps_of(module)
    for guest in conversion.guests:
        if isinstance(guest, SharedAttention) and guest.saw_forward():
            remove_hook(share_attention_hook, module)
