"""reduce_gradients_in_float8: FSDP2's gradients at one byte per element on the wire, added in float32."""

import warnings
from typing import Any

import torch
import torch.distributed as dist

from f8sub.errors import Float8ConfigError, Float8Warning, refuse_other_than_a_module
from f8sub.gradients.reduction import (
    Float8ReduceScatter,
    Hops,
    Reduction,
    hops_of,
    measured_by_module,
    reductions,
)
from f8sub.kernels.triton.support import why_no_triton
from f8sub.torch_compat import is_fsdp_module


def reduce_gradients_in_float8(
    model: torch.nn.Module,
    *,
    flat: bool = False,
    ranks_per_host: int | None = None,
    measure: bool = False,
    measure_every: int = 100,
) -> "GradientReduction":
    """Reduce the gradients of ``model`` from now on with e4m3 data on the wire and sums in float32.

    Call it after ``fully_shard`` on every rank, with the same options. A rank sends each other rank the float8 data of
    its shard's gradients, with an exponent for each 128. Each rank adds what it received in float32, in the order of
    the ranks. So each gradient is rounded once however many ranks there are, and a run has the same bits every time.
    NaN and infinity arrive at exactly their elements. What FSDP2 does with the sum is as before: divide factors,
    accumulation, HSDP's all-reduce, offloading. Use ``reduce_dtype=torch.float32`` in its policy, which costs no byte
    on the wire. Calling it again replaces the options. Checkpoints hold nothing of it.

    Where a shard group has several ranks on each of several hosts there are two hops: bfloat16 is added within each
    host, and float8 data of the sums go to the other hosts.

    Args:
        model: FSDP2 modules, or a model of some. Modules that are sharded over one rank stay as they are.
        flat: one exchange, over several hosts too, where it sends more bytes than a ring of bfloat16.
        ranks_per_host: how many ranks that follow one another share a host; None asks the hosts for their names.
        measure: compare each ``measure_every``-th reduction of a module, the first one too, with torch's in float32,
            whose bytes and memory it also takes; ``decibels`` of what is returned shows it, and ``f8sub.Monitor``.
        measure_every: reductions of a module from one that is measured to the next. Those that a CUDA graph replays
            are neither counted nor measured, see ``GradientReduction.measure_next``.

    Raises:
        Float8ConfigError: the model has no FSDP2 module; a module has a reduce-scatter of its own, or parameters on
            several meshes; its ranks on several hosts cannot take two hops, and ``flat`` does not ask for one; a GPU
            has no Triton kernels. In backward: a CUDA graph is captured of gradients that were not reduced before, or
            FSDP2 reduces in a way that is not known.
        Float8RankMismatchError: ranks of a shard group have different options.
    """
    refuse_other_than_a_module("reduce_gradients_in_float8", model)
    if measure_every < 1 or (ranks_per_host is not None and ranks_per_host < 1):
        raise Float8ConfigError(
            f"measure_every and ranks_per_host are 1 or more, got {measure_every}, {ranks_per_host}"
        )
    found = _reductions(model)
    every = measure_every if measure else 0
    hops: dict[dist.ProcessGroup, Hops | None] = {}
    reduced: dict[str, tuple[Any, Float8ReduceScatter]] = {}
    for fqn, (module, reduction) in found.items():
        group, before = reduction.ranks, reduction.comm
        if group not in hops:
            # A collective: once for each group, in the modules' order, which is the same on all ranks.
            hops[group] = hops_of(group, reduction.device, (flat, ranks_per_host, every))
        # Called again: keep FSDP2's own, so that ``remove`` brings that back.
        if isinstance(before, Float8ReduceScatter):
            before = before.before
        comm = Float8ReduceScatter(before, hops[group], every)
        module.set_custom_reduce_scatter(comm)
        measured_by_module[module] = lambda comm=comm: comm.measured  # type: ignore[misc]
        reduced[fqn] = module, comm
    return GradientReduction(reduced, 2 if any(hops.values()) else 1)


class GradientReduction:
    """Controls the reductions that ``reduce_gradients_in_float8`` set up; its ``str`` is a line for a log."""

    def __init__(self, reduced: dict[str, tuple[Any, Float8ReduceScatter]], hops: int) -> None:
        self._reduced, self._hops = reduced, hops

    def __str__(self) -> str:
        if not self._reduced:
            return "gradients: as FSDP2 reduces them"
        hops = "one hop" if self._hops == 1 else "two hops, bf16 within hosts"
        return f"gradients of {len(self._reduced)} FSDP2 modules: e4m3 1x128, float32 sums, {hops}"

    def decibels(self) -> dict[str, float]:
        """Return signal over error of the last measured reduction of each FSDP2 module, by name, in dB; the host waits.

        20 dB are an error of a tenth of the gradients' norm. The same on all ranks of a shard group. Elements that are
        not finite do not count. Infinity is no error, NaN no gradient.
        """
        measured = {fqn: comm.measured for fqn, (_, comm) in self._reduced.items()}
        return {fqn: float(10 * (m[0] / m[1]).log10()) for fqn, m in measured.items() if m is not None}

    def measure_next(self) -> None:
        """Measure the next reduction of every module, where ``measure`` was asked for; in a step that is launched."""
        for _, comm in self._reduced.values():
            comm.measure_next = True

    def remove(self) -> None:
        """Have FSDP2 reduce gradients as before."""
        for module, comm in self._reduced.values():
            module.set_custom_reduce_scatter(comm.before)
            measured_by_module.pop(module, None)
        self._reduced = {}


def _reductions(model: torch.nn.Module) -> dict[str, tuple[Any, Reduction]]:
    """Return the reductions over several ranks by the modules' names, each group of parameters once."""
    modules = {fqn: module for fqn, module in model.named_modules() if is_fsdp_module(module)}
    if not modules:
        raise Float8ConfigError(
            f"{type(model).__name__} has no FSDP2 module: call fully_shard before reduce_gradients_in_float8"
        )
    found: dict[int, tuple[str, Any, Reduction]] = {}
    for fqn, module in modules.items():
        name, of_module = fqn or "the model", reductions(module)
        if len(of_module) > 1:
            raise Float8ConfigError(
                f"{name} has parameters on {len(of_module)} meshes, of which FSDP2 does not separate the "
                "reduce-scatters: call fully_shard for the modules of each mesh by themselves"
            )
        for reduction in of_module:
            if reduction.ranks is None or reduction.ranks.size() == 1:
                continue
            found.setdefault(id(reduction.key), (fqn, module, reduction))
            if not reduction.is_default and not isinstance(reduction.comm, Float8ReduceScatter):
                raise Float8ConfigError(
                    f"{name} has a reduce-scatter of its own, {type(reduction.comm).__name__}: leave out "
                    "set_custom_reduce_scatter and FSDP2's options of memory for communication, or this call"
                )
            if reduction.device.type == "cuda" and (why := why_no_triton(reduction.device)) is not None:
                raise Float8ConfigError(f"reduce_gradients_in_float8 packs gradients by Triton, which {why}")
    rounded = [fqn or "the model" for fqn, _, reduction in found.values() if reduction.dtype != torch.float32]
    if rounded:
        warnings.warn(
            f"the float32 sums of {len(rounded)} FSDP2 modules, {rounded[0]} first, are rounded to their policy's "
            "reduce_dtype; torch.float32 costs no byte on the wire with reduce_gradients_in_float8",
            Float8Warning,
            stacklevel=3,
        )
    return {fqn: (module, reduction) for fqn, module, reduction in found.values()}
