"""attend_in_float8: attention modules whose scaled_dot_product_attention runs in float8 from now on.

[Note] A module that calls ``scaled_dot_product_attention`` gets a child that holds its state, and a class of its own
whose forward runs under a mode that sends these calls through the state. Modules of transformers call it by way of a
table of functions, so there the mode is around that function alone, and their class stays. A mode is entered inside of
the module's forward, so it is there again wherever forward is repeated: in checkpointing and in compiled code.
"""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

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
from f8sub.convert.filters import matches
from f8sub.errors import Float8ConfigError, Float8Warning, refuse_other_than_a_module, unknown
from f8sub.torch_compat import change_and_restore, is_dtensor

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
    def title(self) -> str:
        """A sentence that says what became of it. Reads from the device how often gradients saturated."""
        if self.state is None or self.reason:
            return f"not in float8: {self.reason}"
        kernels = REFERENCE if self.state.backend == REFERENCE else CUDNN
        line = f"in float8: {kernels}, backward in {self.state.backward}"
        saturated = [f"{name} {count}" for name, count in self.state.saturations.items() if count]
        return line + (f"; backwards that saturated: {', '.join(saturated)}" if saturated else "")


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

    Args:
        model: any module. Of transformers, those with ``attn_implementation="sdpa"``; of others, modules whose own
            code calls ``scaled_dot_product_attention``.
        backward: "float8": dO, dP, dq, dk and dv are e4m3, too, with scales from earlier backwards, which are in the
            state dict. "bf16": of the q, k and v that forward rounded, without a state.
        skip: glob patterns over whole segments of a module's name; a match stays as it was.
        min_length: tokens; attention over fewer stays as it was, because float8 is slower there.
        backend: "auto" takes cuDNN's kernels where they are; "cudnn" raises where they are not; "reference" is the
            same arithmetic on any device, for tests, many times slower.

    Returns:
        The names of the modules.

    Raises:
        Float8ConfigError: an unknown option, no module calls attention, or ``backend="cudnn"`` where there is none.
    """
    refuse_other_than_a_module("attend_in_float8", model)
    if backward not in BACKWARDS_BY_NAME:
        raise unknown("backward", backward, BACKWARDS_BY_NAME)
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
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
    # All that can be refused is, so an error leaves the model as it was.
    for fqn in chosen:
        _convert(callers[fqn], AttentionState(fqn, BACKWARDS_BY_NAME[backward], backend, min_length, device))
    return chosen


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
    for tensor in tensors:
        return tensor.to_local().device if is_dtensor(tensor) else tensor.device
    return torch.device("cpu")


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
