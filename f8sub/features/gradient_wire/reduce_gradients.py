"""reduce_gradients_in_float8: FSDP2's gradients at one byte an element on the wire, added in float32."""

import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from f8sub.errors import Float8ConfigError, Float8Warning
from f8sub.features.gradient_wire.hosts import hops_of
from f8sub.features.gradient_wire.reduction import Float8ReduceScatter, Hops
from f8sub.kernels.triton.support import why_no_triton
from f8sub.torch_compat import Reduction, reductions


def reduce_gradients_in_float8(
    model: torch.nn.Module,
    *,
    hops: int | None = None,
    ranks_per_host: int | None = None,
    measure: bool = False,
    measure_every: int = 100,
) -> "GradientReduction":
    """From now on reduce the gradients of ``model`` with e4m3 codes on the wire and sums in float32.

    Call it after ``fully_shard`` on every rank, with the same options. A rank sends each other rank the codes of its
    shard's gradients, with an exponent for each 128, and each rank adds what it received in float32 in the order of
    the ranks: each gradient is rounded once however many ranks there are, and a run has the same bits every time.
    NaN and infinity arrive at exactly their elements. What FSDP2 does with the sum is as before: divide factors,
    accumulation, HSDP's all-reduce, offloading. Calling it again replaces the options. Checkpoints hold nothing of it.

    Use ``reduce_dtype=torch.float32`` in FSDP2's policy. It costs no byte on the wire then.

    Args:
        model: sharded by FSDP2, also in parts; one FSDP module or a model of several. Modules that are sharded over one
            rank stay as they are.
        hops: how many exchanges; None for two where a shard group has several ranks on each of several hosts, else
            one. Of two, the first adds bfloat16 within each host, and the second sends codes of the sums to the
            other hosts.
        ranks_per_host: how many ranks that follow one another share a host; None asks the hosts for their names.
        measure: compare each ``measure_every``-th reduction of each module with torch's in float32, whose bytes and
            memory it takes besides; ``decibels`` of what is returned tells.
        measure_every: reductions of a module from one that is measured to the next; the first one is measured.

    Returns:
        What tells of it and takes it off again.

    Raises:
        Float8ConfigError: the model has no FSDP2 module; a module has a reduce-scatter of its own, or parameters on
            several meshes; one hop over several hosts would be slower than a ring, and ``hops=1`` does not ask for it;
            an option that is none. In backward: a CUDA graph is captured, or FSDP2 reduces in a way that is not known.
        Float8RankMismatchError: the ranks of a shard group have different options.
    """
    if hops not in (None, 1, 2):
        raise Float8ConfigError(f"hops={hops!r}: give 1, 2, or None for what the hosts ask for")
    for name, value in (("ranks_per_host", ranks_per_host), ("measure_every", measure_every)):
        if value is not None and value < 1:
            raise Float8ConfigError(f"{name}={value!r}: give 1 or more")
    found = dict(_reductions(model))
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise Float8ConfigError(
            f"{type(model).__name__} has no FSDP2 module: call fully_shard before reduce_gradients_in_float8"
        )
    _check(found)
    every = measure_every if measure else 0
    hops_by_group: dict[dist.ProcessGroup, Hops | None] = {}
    reduced: dict[str, tuple[FSDPModule, Float8ReduceScatter]] = {}
    for fqn, (module, reduction) in found.items():
        group = reduction.ranks
        if group is None or not reduction.is_sharded:
            continue
        if group not in hops_by_group:
            hops_by_group[group] = hops_of(group, hops, ranks_per_host, (every, len(found)))
        before = reduction.comm
        if isinstance(before, Float8ReduceScatter):
            before = before.before
        comm = Float8ReduceScatter(before, hops_by_group[group], every)
        module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]
        reduced[fqn] = module, comm
    return GradientReduction(reduced, 2 if any(hops_by_group.values()) else 1)


class GradientReduction:
    """What ``reduce_gradients_in_float8`` set up; its ``str`` is one line for a log."""

    def __init__(self, reduced: dict[str, tuple[FSDPModule, Float8ReduceScatter]], hops: int) -> None:
        self._reduced, self._hops = reduced, hops

    def __str__(self) -> str:
        if not self._reduced:
            return "gradients: as FSDP2 reduces them, on one rank"
        hops = "one hop" if self._hops == 1 else "two hops, bf16 within hosts"
        return f"gradients of {len(self._reduced)} FSDP modules: e4m3 1x128, float32 sums, {hops}"

    def decibels(self) -> dict[str, float]:
        """Signal over error of the last measured reduction of each FSDP module, by its name; the host waits for it.

        20 dB are an error of a tenth of the gradients' norm. The same on all ranks of a shard group. Elements that are
        not finite do not count. Infinity is no error, NaN no gradient.
        """
        found = {fqn: comm.decibels() for fqn, (_, comm) in self._reduced.items()}
        return {fqn: decibels for fqn, decibels in found.items() if decibels is not None}

    def remove(self) -> None:
        """Have FSDP2 reduce gradients as before."""
        for module, comm in self._reduced.values():
            module.set_custom_reduce_scatter(comm.before)
        self._reduced = {}


def _reductions(model: torch.nn.Module) -> Iterator[tuple[str, tuple[FSDPModule, Reduction]]]:
    """By name, each group of parameters once.

    Raises:
        Float8ConfigError: see ``reduce_gradients_in_float8``.
    """
    seen: set[int] = set()
    for fqn, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        of_module = reductions(module)
        if len(of_module) > 1:
            raise Float8ConfigError(
                f"{fqn or 'the model'} has parameters on {len(of_module)} meshes, of which FSDP2 cannot tell a "
                "reduce-scatter apart: call fully_shard for the modules of each mesh by themselves"
            )
        for reduction in of_module:
            if id(reduction.key) in seen:
                continue
            seen.add(id(reduction.key))
            if not reduction.is_default and not isinstance(reduction.comm, Float8ReduceScatter):
                raise Float8ConfigError(
                    f"{fqn or 'the model'} has a reduce-scatter of its own, {type(reduction.comm).__name__}: leave out "
                    "set_custom_reduce_scatter and FSDP2's options of memory for communication, or this call"
                )
            yield fqn, (module, reduction)


def _check(found: dict[str, tuple[FSDPModule, Reduction]]) -> None:
    sharded = {fqn: reduction for fqn, (_, reduction) in found.items() if reduction.is_sharded}
    for device in {reduction.device for reduction in sharded.values() if reduction.device.type == "cuda"}:
        if (why := why_no_triton(device)) is not None:
            raise Float8ConfigError(f"reduce_gradients_in_float8 packs gradients by Triton, which {why}")
    rounded = [fqn or "the model" for fqn, reduction in sharded.items() if reduction.dtype != torch.float32]
    if rounded:
        warnings.warn(
            f"the float32 sums of {len(rounded)} FSDP modules, {rounded[0]} first, are rounded to their policy's "
            "reduce_dtype; torch.float32 costs no byte on the wire with reduce_gradients_in_float8",
            Float8Warning,
            stacklevel=3,
        )
