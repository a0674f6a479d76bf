"""Monitor: amaxes, scales and errors of each layer's x, w and dy, in one step of every N.

In a step that is sampled, hooks see x, w and dy in high precision and cast them once more, which gives the codes that
the layer multiplies; compiled code runs eagerly meanwhile. Nothing waits for the device: one table for all operands is
reduced over the ranks, copied behind the step, and read when it has arrived. All other steps cost a counter.
"""

import contextlib
import fnmatch
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from f8sub.errors import Float8ConfigError
from f8sub.features.monitor import writers
from f8sub.features.monitor.advice import advice_for
from f8sub.features.monitor.statistics import MAXIMA, WIDTH, Statistics, measure, statistics_of
from f8sub.features.monitor.writers import Writer
from f8sub.formats import Float8Format, Operand, Rounding, Tile
from f8sub.kernels import reference
from f8sub.kernels.quantize import quantize
from f8sub.kernels.scales import LayerSource
from f8sub.linear import sockets
from f8sub.linear.float8_linear import Float8Linear, weight_rowwise
from f8sub.linear.saved_input import Call
from f8sub.linear.sockets import contexts, sources_of
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.tensor.host_copy import HostCopy
from f8sub.torch_compat import autocast_dtype, is_dtensor
from f8sub.weights.weight import Weight, master_of

ROLES = ("x", "w", "dy")


class Monitor:
    """Measures what float8 does to each layer.

    monitor = f8sub.Monitor(model, every=100, to="runs/a/numerics.jsonl")
    for batch in data:
        with monitor:
            loss(model(batch)).backward()
        optimizer.step()
    print(monitor.worst(8))

    Losses and gradients of eager code are the same with and without, bitwise; a sampled step of compiled code runs
    eagerly. Of several forwards in one step the first is measured. All ranks sample the same steps, and each has the
    statistics of all ranks together.

    Args:
        model: converted; plain, compiled, or under DDP, FSDP2 or tensor parallelism.
        every: a step of so many is sampled, the first one among them.
        to: where rows go, on the first rank of the group: the path of a JSON lines file, a function of (step, rows), or
            a list of these; see ``f8sub.features.monitor.writers`` for TensorBoard and Weights & Biases.
        layers: glob patterns of the layers to measure, over whole names.
        roles: of "x", "w" and "dy", those to measure.
        group: the ranks whose statistics are put together; None for all. Of a pipeline give those of one stage.

    Raises:
        Float8ConfigError: no converted layer matches, or a role that there is not.
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
        if every < 1 or not set(roles) <= set(ROLES):
            raise Float8ConfigError(
                f"every is 1 or more and roles are of {ROLES}, got every={every}, roles={roles}"
            )
        patterns = [layers] if isinstance(layers, str) else layers
        self._layers = {
            name.replace("_orig_mod.", ""): module
            for name, module in model.named_modules()
            if isinstance(module, Float8Linear)
        }
        self._layers = {
            name: layer
            for name, layer in self._layers.items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        }
        if not self._layers:
            raise Float8ConfigError(
                f"Monitor found no float8 layer that {', '.join(patterns)} names; f8sub.conversion_report(model) lists "
                "them"
            )
        self._every, self._group = every, group
        self._rows = {
            (name, role): i for i, (name, role) in enumerate((n, r) for n in self._layers for r in roles)
        }
        several = [to] if callable(to) or isinstance(to, str | os.PathLike) else to
        self._writers: list[Writer] = [w if callable(w) else writers.jsonl(w) for w in several]
        self._step = -1
        self._sample: _Sample | None = None
        self._pending: list[tuple[_Sample, HostCopy]] = []
        self.rows: list[Statistics] = []
        """All rows so far, in the order of the steps."""

    def __enter__(self) -> "Monitor":
        self._begin()
        return self

    def __exit__(self, *error: object) -> None:
        self._end(failed=error[0] is not None)

    def attach(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Sample without a ``with``: a step ends when the optimizer's does.

        Returns:
            Call it to detach.
        """

        def before(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if (args[1] if len(args) > 1 else kwargs.get("closure")) is None:
                self._end(failed=False)

        def after(*_: Any) -> None:
            self._end(failed=False)  # of a step with a closure, in which the model runs
            self._begin()

        self._begin()
        handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

        def detach() -> None:
            for handle in handles:
                handle.remove()
            self._end(failed=True)

        return detach

    def worst(self, count: int = 8) -> str:
        """The operands with the lowest median-row SQNR in the last sample, with advice; a table.

        Operands with NaN or infinity come first, those that are all 0 last.
        """
        self._read(wait=True)
        last = [row for row in self.rows if row.step == self.rows[-1].step]
        width = max([len(row.layer) for row in last], default=5)
        lines = [f"{'layer':{width}} role  row dB     dB  flushed  saturated      amax  advice"]
        for row in sorted(last, key=_badness)[:count]:
            lines.append(
                f"{row.layer:{width}} {row.role:4} {row.row_sqnr:7.1f} {row.sqnr:6.1f} {row.flushed:8.2%} "
                f"{row.saturated:10.3%} {row.amax:9.2e}  {advice_for(row)}".rstrip()
            )
        return "\n".join(lines)

    def heatmap(self, role: str, path: str | os.PathLike[str], statistic: str = "row_sqnr") -> None:
        """Draw one statistic of an operand, layers by steps, as a picture.

        Raises:
            Float8ConfigError: matplotlib is not installed, or there is no such row.
        """
        self._read(wait=True)
        writers.heatmap(self.rows, path, role, statistic)

    def flush(self) -> None:
        """Write what was sampled and not written yet; at the end of a run."""
        self._read(wait=True)

    def _begin(self) -> None:
        self._end(failed=True)
        self._step += 1
        self._read(wait=False)
        if self._step % self._every == 0:
            self._sample = _Sample(self._step, self._layers, self._rows)

    def _end(self, *, failed: bool) -> None:
        sample, self._sample = self._sample, None
        if sample is None:
            return
        sample.close()
        if not failed:
            self._pending.append((sample, HostCopy(sample.reduced(self._group))))

    def _read(self, *, wait: bool) -> None:
        while self._pending and (wait or self._pending[0][1].there):
            sample, copy = self._pending.pop(0)
            rows = sample.statistics(copy.read())
            self.rows += rows
            if not dist.is_initialized() or dist.get_rank(self._group) == 0:
                for write in self._writers:
                    write(sample.step, rows)


def _badness(row: Statistics) -> tuple[bool, float]:
    """The key that sorts rows, those with NaN first: NaN compares with nothing."""
    return not math.isnan(row.sqnr), math.inf if math.isnan(row.row_sqnr) else row.row_sqnr


class _Sample:
    """The hooks of one step, and the table that they fill."""

    def __init__(self, step: int, layers: dict[str, Float8Linear], rows: dict[tuple[str, str], int]) -> None:
        self.step, self._rows = step, rows
        self._formats: dict[tuple[str, str], Float8Format] = {}
        weight = next(iter(layers.values())).weight
        # Where the layers run: CPU offload keeps shards elsewhere.
        device = weight.device_mesh.device_type if is_dtensor(weight) else weight.device
        self._sums = torch.zeros(len(rows), WIDTH, dtype=torch.float32, device=device)
        self._maxima = torch.full((len(rows), len(MAXIMA)), -torch.inf, dtype=torch.float32, device=device)
        self._exits = contextlib.ExitStack()
        for name, layer in layers.items():
            before = layer.register_forward_pre_hook(functools.partial(self._before, name), with_kwargs=True)
            # Before other hooks, which may put something else in the place of y.
            after = layer.register_forward_hook(functools.partial(self._after, name), prepend=True)
            self._exits.callback(before.remove)
            self._exits.callback(after.remove)
        self._exits.enter_context(torch.compiler.set_stance("force_eager"))
        self._calls: dict[str, Call] = {}
        self._seen: set[str] = set()  # backward meets the last of several forwards first

    def close(self) -> None:
        """Remove the hooks."""
        self._exits.close()

    def reduced(self, group: dist.ProcessGroup | None) -> torch.Tensor:
        """The table, of all ranks together."""
        if dist.is_initialized() and dist.get_world_size(group) > 1:
            dist.all_reduce(self._sums, dist.ReduceOp.SUM, group=group)
            dist.all_reduce(self._maxima, dist.ReduceOp.MAX, group=group)
        return torch.cat([self._sums, self._maxima], dim=1)

    def statistics(self, table: torch.Tensor) -> list[Statistics]:
        """The rows of a table that came to the host."""
        found = []
        for (name, role), index in self._rows.items():
            format = self._formats.get((name, role))
            if format is None:
                continue
            numbers = table[index].tolist()
            made = statistics_of(self.step, name, role, format, numbers[:WIDTH], numbers[WIDTH:])
            found += [made] if made is not None else []
        return found

    def _before(self, name: str, layer: Float8Linear, args: Any, kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or name in self._calls:
            return
        with torch.no_grad():
            x: torch.Tensor = args[0] if args else kwargs["input"]
            weight: torch.Tensor = layer.weight
            plan = contexts.plan_of(layer) if contexts.entered else layer.plan
            recipe = plan.recipe
            dtype = autocast_dtype(x.device.type) or x.dtype
            sources = sources_of(layer, recipe)
            if is_dtensor(weight):
                x, weight, _, _, sources, _ = sockets.placement(layer, plan, weight, x, None, sources)
            self._calls[name] = call = plan, dtype, sources
            if not isinstance(x, Float8Tensor):
                self._note(name, "x", x, recipe.fprop.a, dtype, sources.x)
            if recipe.fprop.b is not None and (name, "w") in self._rows:
                self._note_weight(name, layer, weight, recipe.fprop.b, call)

    def _note_weight(
        self,
        name: str,
        layer: Float8Linear,
        weight: torch.Tensor,
        format: Float8Format,
        call: Call,
    ) -> None:
        if isinstance(weight, Float8Tensor):
            shard = layer.converted.record_of(layer, "weight").shard
            if shard is None or not shard.master.numel() or weight.rowwise is None:
                self._formats[name, "w"] = format
                return
            values = shard.values.to(shard.dtype).to(weight.device)
            row, col = (a - b for a, b in zip(shard.layout.offset, shard.layout.origin, strict=True))
            self._take(name, "w", values, _part(weight.rowwise, row, col, *values.shape))
            return
        master = master_of(weight) if isinstance(weight, Weight) else weight
        if master is None:
            return  # codes alone
        values = master.plain if isinstance(master, Weight) else master
        operand = weight_rowwise(weight, call)
        if isinstance(operand, Operand):
            self._take(name, "w", values.to(call[1]), operand)

    def _after(self, name: str, layer: Float8Linear, args: Any, y: torch.Tensor) -> None:
        if not y.requires_grad or name not in self._calls or name in self._seen:
            return
        self._seen.add(name)
        recipe = self._calls[name][0].recipe
        if (format := recipe.dgrad.a or recipe.wgrad.a) is not None:
            y.register_hook(functools.partial(self._note_dy, name, format))

    def _note_dy(self, name: str, format: Float8Format, dy: torch.Tensor) -> None:
        if (name, "dy") in self._formats:
            return
        with torch.no_grad():
            local = dy.to_local() if is_dtensor(dy) else dy
            self._note(name, "dy", local, format, local.dtype, self._calls[name][2].dy)

    def _note(
        self,
        name: str,
        role: str,
        tensor: torch.Tensor,
        format: Float8Format | None,
        dtype: torch.dtype,
        source: LayerSource,
    ) -> None:
        if format is None or (name, role) not in self._rows:
            return
        matrix = tensor.detach().reshape(-1, tensor.shape[-1]).to(dtype)
        stochastic = format.rounding is Rounding.STOCHASTIC
        with torch.random.fork_rng([matrix.device] if matrix.is_cuda else [], enabled=stochastic):
            operand = quantize(matrix, format, None, source).rowwise  # then the layer draws the same numbers
        if operand is not None:
            self._take(name, role, matrix, operand)

    def _take(self, name: str, role: str, values: torch.Tensor, operand: Operand) -> None:
        self._formats[name, role] = operand.format
        if values.numel():
            index = self._rows[name, role]
            self._sums[index], self._maxima[index] = measure(values, operand)


def _part(operand: Operand, row: int, col: int, rows: int, cols: int) -> Operand:
    """A part of an operand, with a scale for each element: its tiles need not begin where the part does."""
    per_byte = operand.format.codes_per_byte
    data = operand.data[row : row + rows, col // per_byte : -(-(col + cols) // per_byte)]
    scale = reference.spread(
        operand.scale_inv.float(), operand.format.tile, torch.Size((rows, cols)), (row, col)
    )
    if operand.global_scale_inv is not None:
        scale = scale * operand.global_scale_inv
    return Operand(data, scale.expand(rows, cols), _each(operand.format))


@functools.cache
def _each(format: Float8Format) -> Float8Format:
    """A format of the same codes with a float32 scale for each element."""
    return Float8Format(format.dtype, Tile(1, 1))
