"""Monitor: amaxes, scales and errors of each layer's operands, in one step of every N.

In a step that is sampled, hooks see x, w and dy in high precision and cast them once more, which gives the codes that
the layer multiplies; compiled code runs eagerly meanwhile. Nothing waits for the device: one table for all operands is
reduced over the ranks, copied behind the step, and read when it has arrived. All other steps cost a counter.

Errors of reduced gradients are rows of it, too.
"""

import fnmatch
import functools
import math
import os
import warnings
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from f8sub.capture import current_capture
from f8sub.convert.attention import attention_modules
from f8sub.convert.patterns import matches
from f8sub.convert.products import products_of
from f8sub.diagnostics import writers
from f8sub.diagnostics.sample import RESULTS, ROLES, Sample
from f8sub.diagnostics.statistics import ATTENTION, GRADIENT, Statistics, advice_for, decibels
from f8sub.diagnostics.writers import Writer
from f8sub.errors import Float8ConfigError, Float8Warning, nearest, refuse_other_than_a_module, unknown
from f8sub.gradients.reduction import measured_by_module
from f8sub.host_copy import HostCopy
from f8sub.linear.converted import ConvertedModule

MOST_ROWS = 100_000
"""Rows that a ``Monitor`` holds in memory, where each takes about 500 bytes; writers have all."""


class GradientRows:
    """Finds the errors of a model's reduced gradients that are measured and not reported yet."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._told = model, weakref.WeakKeyDictionary[object, torch.Tensor]()
        self._modules: dict[str, torch.nn.Module] = {}
        self._known = 0

    def new(self) -> "tuple[list[str], HostCopy] | None":
        """Return names of modules, and their squares on the way to the host; None, cheaply, if there are none."""
        # Modules are walked only when a reduction was added or removed.
        if self._known != len(measured_by_module):
            self._known = len(measured_by_module)
            modules = self._model.named_modules()
            self._modules = {name: module for name, module in modules if module in measured_by_module}
        names, found = [], []
        for name, module in self._modules.items():
            squares = measured_by_module[module]() if module in measured_by_module else None
            # The same tensor as last time: nothing was measured since.
            if squares is not None and squares is not self._told.get(module):
                self._told[module] = squares
                names.append(name.replace("_orig_mod.", "") or "(root)")
                found.append(squares)
        return (names, HostCopy(torch.stack(found))) if found else None


class AttentionRows:
    """Has modules that attend in float8 compare one call of a sampled step with attention in high precision.

    Attributes:
        modules: those that attend in float8, by name, and that a pattern names.
    """

    def __init__(self, model: torch.nn.Module, patterns: Sequence[str]) -> None:
        found = {each.fqn.replace("_orig_mod.", ""): each for each in attention_modules(model)}
        self.modules = {
            name: each for name, each in found.items() if each.state is not None and _is_named(name, patterns)
        }
        self._states = {name: each.state for name, each in self.modules.items() if each.state is not None}

    def begin(self) -> None:
        """Ask for the next call of each."""
        for state in self._states.values():
            state.compare_next()

    def end(self) -> "tuple[list[str], HostCopy] | None":
        """Return names of modules, and their squares on the way to the host; None if none was called."""
        squares = {name: state.compared() for name, state in self._states.items()}
        found = {name: each for name, each in squares.items() if each is not None}
        return (list(found), HostCopy(torch.stack(list(found.values())))) if found else None

    def worst(self, rows: Sequence[Statistics], count: int) -> list[str]:
        """Return lines on the modules with the lowest SQNR in their last rows, and what became of the others."""
        last = {row.layer: row.sqnr for row in rows if row.role == ATTENTION}

        def badness(name: str) -> tuple[bool, bool, float]:
            db = last.get(name, math.inf)
            return name in last, not math.isnan(db), db

        # Those that were not called in float8, and NaN, before all others.
        order = sorted(self.modules, key=badness)
        width = max(map(len, ("attention", *order)))
        lines = [f"{'attention':{width}}  dB of o"]
        for name in order[:count]:
            module, state = self.modules[name], self._states[name]
            # As the last call left it; what can never be is known without one.
            told = module._replace(reason=state.reason or module.reason).title
            lines.append(f"{name:{width}} {last.get(name, math.nan):8.1f}  {told}")
        return lines if order else []


def rows_of(step: int, names: list[str], role: str, format: str, squares: torch.Tensor) -> list[Statistics]:
    """Return a row per module from squares (modules, 2), signal and error, on the host."""
    numbers = [name for name in Statistics._fields if name not in ("step", "layer", "role", "format")]
    rows = []
    for name, (signal, error) in zip(names, squares.tolist(), strict=True):
        # NaN: the error alone is measured.
        of_row = {**dict.fromkeys(numbers, float("nan")), "sqnr": decibels(signal, error)}
        rows.append(Statistics(step, name, role, format, **of_row))
    return rows


class Monitor:
    """Measures what float8 does to each layer.

    monitor = f8sub.Monitor(model, every=100, to="runs/a/numerics.jsonl")
    for batch in data:
        with monitor:
            loss(model(batch)).backward()
        optimizer.step()
    print(monitor.worst(8))

    Where ``reduce_gradients_in_float8`` measures, each measured reduction is a row of the step that it was in, with
    role "gradient" and the name of its FSDP2 module. A module that attends in float8 has a row with role "attention",
    the error of what this rank's first call returned; ``worst`` shows which of its gradients saturated, too.

    Losses and gradients of eager code are the same with and without, bitwise; a sampled step of compiled code runs
    eagerly. Of several forwards in one step the first is measured, and none under ``no_grad``. All ranks sample the
    same steps, and each has the statistics of all ranks together.

    The replay of a CUDA graph calls no hook, so a step that is sampled has to be launched: ``sampling`` says which one.
    A sample that saw no forward has no rows, and the first one is a ``Float8Warning``.

    Args:
        model: converted, or one that attends in float8; plain, compiled, or under DDP, FSDP2 or tensor parallelism.
        every: one step of so many is sampled, beginning with the first.
        to: where rows go, on the first rank of the group: the path of a JSON lines file, a function of (step, rows), or
            a list of these; see ``f8sub.diagnostics.writers`` for TensorBoard and Weights & Biases. Where one
            fails, a ``Float8Warning`` says so, and the run goes on.
        layers: glob patterns of the layers to measure, as ``skip`` of ``convert_to_float8``, and of modules that attend
            in float8. A pattern may also match a whole name, with a ``*`` that reaches over dots: "layers*proj".
        roles: of "x", "w" and "dy", those to measure; and of "y", "dx" and "dw", see ``RESULTS``.
        group: the ranks whose statistics are put together; None for all. Of a pipeline give those of one stage.

    Raises:
        Float8ConfigError: nothing in float8 matches, a role that there is not, or an argument of another type.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        every: int = 100,
        to: str | os.PathLike[str] | Writer | Sequence[str | os.PathLike[str] | Writer] = (),
        *,
        layers: str | Sequence[str] = "*",
        roles: Sequence[str] = ROLES,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        refuse_other_than_a_module("Monitor", model)
        if type(every) is not int or every < 1:
            raise Float8ConfigError(f"every is a number of steps, 1 or more, got {every!r}")
        if not _is_list_of(str, roles) or not roles:
            raise Float8ConfigError(f"roles is a list, of {', '.join((*ROLES, *RESULTS))}, got {roles!r}")
        if others := [role for role in roles if role not in (*ROLES, *RESULTS)]:
            raise unknown("role", others[0], (*ROLES, *RESULTS))
        patterns = [layers] if isinstance(layers, str) else layers
        if not _is_list_of(str, patterns):
            raise Float8ConfigError(f"layers is a pattern of names, or a list of them, got {layers!r}")
        several = [to] if callable(to) or isinstance(to, str | os.PathLike) else to
        if not _is_list_of(str | os.PathLike | Callable, several):
            raise Float8ConfigError(
                f"to is the path of a file, a function of (step, rows), or a list of these, got {to!r}"
            )
        self._model = model
        modules = ((name.replace("_orig_mod.", ""), module) for name, module in model.named_modules())
        named = {name: module for name, module in modules if isinstance(module, ConvertedModule)}
        products = {name: list(products_of(module, name)) for name, module in named.items()}
        # Experts' rows come after those of linear layers.
        ordered = sorted(
            (p for several in products.values() for p in several), key=lambda p: p.groups is not None
        )
        self._attention = AttentionRows(model, patterns)
        there = [product.name for product in ordered]
        # Attention alone may be in float8, or named.
        names = [name for name in there if _is_named(name, patterns)] or (
            [] if self._attention.modules else _refuse_unnamed(there, patterns)
        )
        self._modules = {name: m for name, m in named.items() if any(p.name in names for p in products[name])}
        self.group = group
        """The ranks whose statistics are put together, the same on all of them; it may be set in the first step."""
        self._every = every
        self._rows = {(name, role): i for i, (name, role) in enumerate((n, r) for n in names for r in roles)}
        self._writers = [writers.lasting(w) if callable(w) else writers.jsonl(w) for w in several]
        self._step, self._in_step = -1, False
        self._sample: Sample | None = None
        self._warned = False
        self._gradients = GradientRows(model)
        self._pending: list[tuple[int, HostCopy, Callable[[torch.Tensor], list[Statistics]]]] = []
        self.rows: list[Statistics] = []
        """Rows so far, in the order of the steps; of more than ``MOST_ROWS`` those of older samples are thinned out."""

    def __enter__(self) -> "Monitor":
        if current_capture() is not None:
            raise Float8ConfigError(
                "a Monitor is entered in the function that graph_step captures, which replays do not call; enter it "
                "around the call of the step"
            )
        self._begin()
        return self

    def __exit__(self, *error: object) -> None:
        self._end(failed=error[0] is not None)

    def attach(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Sample without a ``with``: a step ends when the optimizer's does. One that was entered goes on.

        Returns:
            Call it to detach.
        """

        def before(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            # args[0] is the optimizer. With a closure the model runs inside of the step, which ends later.
            if (args[1] if len(args) > 1 else kwargs.get("closure")) is None:
                self._end(failed=False)

        def after(*_: Any) -> None:
            self._end(failed=False)  # of a step with a closure, in which the model runs
            self._begin()

        def replayed() -> None:
            self._end(failed=False)
            self._begin()

        def captured(*_: Any) -> None:
            # Replays call no hooks of the optimizer.
            if (capture := current_capture()) is not None:
                capture.after_replay(replayed)

        if not self._in_step:
            self._begin()
        handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        handles.append(optimizer.register_step_post_hook(captured))

        def detach() -> None:
            for handle in handles:
                handle.remove()
            self._end(failed=True)

        return detach

    @property
    def sampling(self) -> bool:
        """True if the step that runs now, or next, is sampled; the same on all ranks."""
        return self._sample is not None

    def worst(self, count: int = 8) -> str:
        """Return a table of the operands with the lowest median-row SQNR in the last sample, with advice.

        Operands with NaN or infinity come first, those that are all 0 last. Attention in float8 has a table of its own
        below, which reads from the device how often gradients saturated.

        Raises:
            Float8ConfigError: ``count`` is no number of operands.
        """
        if type(count) is not int or count < 1:
            raise Float8ConfigError(f"count is a number of operands, 1 or more, got {count!r}")
        self._read(wait=True)
        operands = [row for row in self.rows if row.role in ROLES]
        attended = self._attention.worst(self.rows, count)
        if not operands and attended and not self._modules:
            return "\n".join(attended)
        if not operands:
            return (
                f"no sample yet: the first step has one, and then one step in {self._every}. A forward pass under "
                "no_grad is not measured"
            )
        last = [row for row in operands if row.step == operands[-1].step]
        width = max(len(row.layer) for row in last)
        lines = [f"{'layer':{width}} role  row dB     dB  flushed  saturated      amax  advice"]
        for row in sorted(last, key=_badness)[:count]:
            lines.append(
                f"{row.layer:{width}} {row.role:4} {row.row_sqnr:7.1f} {row.sqnr:6.1f} {row.flushed:8.2%} "
                f"{row.saturated:10.3%} {row.amax:9.2e}  {advice_for(row)}".rstrip()
            )
        return "\n".join([*lines, *attended])

    def heatmap(self, role: str, path: str | os.PathLike[str], statistic: str = "row_sqnr") -> None:
        """Draw one statistic of an operand, layers by steps, as a picture.

        Raises:
            Float8ConfigError: matplotlib is not installed, there is no such row, or the path ends like no picture.
        """
        self._read(wait=True)
        writers.heatmap(self.rows, path, role, statistic)

    def flush(self) -> None:
        """Write what was sampled and not written yet; at the end of a run."""
        self._read(wait=True)

    def _begin(self) -> None:
        # A step that did not end, as after an exception, is dropped.
        self._end(failed=True)
        self._step, self._in_step = self._step + 1, True
        # Rows that have arrived are written; the host waits for none.
        self._read(wait=False)
        if self._step % self._every == 0:
            self._sample = Sample(self._step, self._modules, self._rows)
            self._attention.begin()

    def _end(self, *, failed: bool) -> None:
        sample, self._sample, self._in_step = self._sample, None, False
        if sample is not None:
            sample.close()
            attended = self._attention.end()
            if attended is not None and not failed:
                names, copy = attended
                told = functools.partial(rows_of, self._step, names, ATTENTION, "e4m3")
                self._pending.append((self._step, copy, told))
            if not failed:
                if self._modules:
                    self._check(sample)
                # A collective, which all ranks come to: they sample the same steps.
                copy = HostCopy(sample.reduced(self.group))
                self._pending.append((self._step, copy, sample.statistics))
        if not failed and (gradients := self._gradients.new()) is not None:
            names, copy = gradients
            told = functools.partial(rows_of, self._step, names, GRADIENT, "e4m3 1x128")
            self._pending.append((self._step, copy, told))

    def _check(self, sample: Sample) -> None:
        if sample.saw_nothing and not self._warned:
            self._warned = True
            warnings.warn(
                f"Monitor sampled step {self._step} and saw no forward of its layers, so the step has no rows. "
                "Was it the replay of a CUDA graph, which calls no hook? Launch the steps in which monitor.sampling is "
                "True",
                Float8Warning,
                stacklevel=4,
            )

    def _read(self, *, wait: bool) -> None:
        # In order, so that writers see steps rise.
        while self._pending and (wait or self._pending[0][1].there):
            step, copy, told = self._pending.pop(0)
            rows = told(copy.read())
            self._hold(rows)
            # All ranks have the rows, and the first one writes.
            if not dist.is_initialized() or dist.get_rank(self.group) == 0:
                for write in self._writers:
                    write(step, rows)

    def _hold(self, rows: list[Statistics]) -> None:
        """Add rows; if there are too many of them, leave out every second sample, from the last one back."""
        self.rows += rows
        if len(self.rows) > MOST_ROWS:
            held = set(list(dict.fromkeys(row.step for row in self.rows))[::-2])
            self.rows[:] = [row for row in self.rows if row.step in held]


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    return any(matches(p, name) or fnmatch.fnmatchcase(name, p) for p in patterns)


def _refuse_unnamed(there: Sequence[str], patterns: Sequence[str]) -> NoReturn:
    """Raise a Float8ConfigError for patterns that name none of the float8 layers that are there."""
    if not there:
        raise Float8ConfigError(
            "Monitor found no float8 layer: the model is not converted; call f8sub.convert_to_float8(model) first, or "
            "f8sub.attend_in_float8(model) and layers= that names what it returns"
        )
    near = ", ".join(nearest(patterns[0], there)) if patterns else ""
    raise Float8ConfigError(
        f"Monitor found no float8 layer that {', '.join(patterns)} names"
        + (f" (nearest: {near})" if near else "")
        + "; f8sub.conversion_report(model) lists them"
    )


def _is_list_of(kind: Any, values: object) -> bool:
    # A string is a sequence of strings.
    if isinstance(values, str) or not isinstance(values, Sequence | Set):
        return False
    return all(isinstance(value, kind) for value in values)


def _badness(row: Statistics) -> tuple[bool, float]:
    """Return a key that sorts the worst rows first, those with NaN before all others."""
    # NaN compares with nothing, so a flag sorts it.
    return not math.isnan(row.sqnr), math.inf if math.isnan(row.row_sqnr) else row.row_sqnr
