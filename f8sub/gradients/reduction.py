"""The reduce-scatter of one FSDP module's gradients: bytes exchanged, sums in float32.

[Note] FSDP2 asks a reduce-scatter for a flat buffer, copies the gradients into it (``fsdp::chunk_cat``), asks for the
output, and has the one reduced into the other. The buffer here is a tensor subclass without storage: the copy
dispatches to it and becomes the cast, so no flat copy of the gradients in high precision is ever made.
"""

import hashlib
import math
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from f8sub.capture import current_capture, is_capturing
from f8sub.errors import Float8ConfigError, Float8RankMismatchError
from f8sub.gradients.wire import Chunk, GradientChunks, Layout, add, chunk_size, layout_of, pack
from f8sub.torch_compat import (
    CHUNK_CATS,
    WORKS_WITH,
    all_gather,
    chunk_cat,
    is_alive,
    new_group,
    reduce_dtype,
    reduce_scatter,
    reduce_scatter_of,
    reduced_groups,
    shard_ranks,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def factor_of(op: Any, ranks: int) -> float:
    """Return the factor by which a reduction by ``op`` multiplies a sum over ``ranks``.

    Raises:
        Float8ConfigError: ``op`` is neither sum nor mean.
    """
    # FSDP2 gives a plain kind, or a PREMUL_SUM with a factor, which has no accessor but its pickled state.
    kind, factor = (op, None) if isinstance(op, dist.ReduceOp.RedOpType) else op.__getstate__()
    factors = {dist.ReduceOp.SUM: 1.0, dist.ReduceOp.AVG: 1 / ranks, dist.ReduceOp.PREMUL_SUM: factor}
    found = factors.get(kind)
    if found is None:
        raise Float8ConfigError(
            f"FSDP2 was to reduce gradients by {op}; reduce_gradients_in_float8 has sums and means"
        )
    return float(found)


class Reduction(NamedTuple):
    """Describes how FSDP2 reduces the gradients of a module's parameters.

    Attributes:
        key: the same object for modules whose parameters are one group.
        ranks: the process group over which they are sharded; None where they are not.
        dtype: of the sum.
        device: of the sum.
        comm: FSDP2's ``ReduceScatter``.
        is_default: whether that is torch's own.
    """

    key: Any
    ranks: Any
    dtype: torch.dtype
    device: torch.device
    comm: Any
    is_default: bool


def reductions(module: "FSDPModule") -> list[Reduction]:
    """Return the reductions of the parameters that ``fully_shard`` put together for ``module``, one for each mesh."""
    return [
        Reduction(group, shard_ranks(group), reduce_dtype(group), group.device, *reduce_scatter_of(group))
        for group in reduced_groups(module)
    ]


Squares = Callable[[], torch.Tensor | None]

measured_by_module: "weakref.WeakKeyDictionary[object, Squares]" = weakref.WeakKeyDictionary()
"""By module, what gives the squares of the module's last measured gradients and of their error, float64,
(2,), on its device; None before the first. Each measurement is a tensor of its own."""


def _unknown(what: str) -> Float8ConfigError:
    return Float8ConfigError(
        f"{what}: torch {torch.__version__} reduces gradients in a way that reduce_gradients_in_float8, which packs "
        f"them as bytes, does not know. It works with torch {WORKS_WITH}: install one of those, or do without it"
    )


class Hops(NamedTuple):
    """Process groups of a shard group that spans hosts: this host's ranks, and their counterparts on all hosts."""

    within: dist.ProcessGroup
    across: dist.ProcessGroup


@dataclass
class Packed:
    """Gradients as they are sent, and in float32 where they are measured; and what FSDP2 divided them by since."""

    layout: Layout
    wire: torch.Tensor
    exact: torch.Tensor | None
    divisor: float = 1.0


class GradientBuffer(torch.Tensor):
    """Stands for FSDP2's flat input, and for views of it; ``contents`` has the ``Packed`` that it was filled with."""

    reduction: "Float8ReduceScatter"
    contents: list[Packed]

    @classmethod
    def of(
        cls,
        reduction: "Float8ReduceScatter",
        contents: list[Packed],
        like: torch.Tensor,
        device: torch.device,
    ) -> "GradientBuffer":
        """Return a buffer with the shape and dtype of ``like``."""
        made: GradientBuffer = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=device
        )
        made.reduction, made.contents = reduction, contents
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Handle how FSDP2 shapes the buffer, fills it and divides it; for anything else there are no values."""
        name, buffer = func.name(), args[0]
        if name == "aten::view":
            like = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta").view(args[1])
            return cls.of(buffer.reduction, buffer.contents, like, buffer.device)
        if name in CHUNK_CATS:
            return cls._filled(*args, **kwargs)
        if name == "aten::div_.Scalar" or (
            name == "aten::div_.Tensor" and not isinstance(args[1], torch.Tensor)
        ):
            # float8 data are not divided: the factor goes into the sum, which is rounded once.
            buffer.contents[0].divisor *= args[1]
            return buffer
        raise _unknown(f"{name} was called on FSDP2's flat buffer of gradients")

    @staticmethod
    def _filled(
        gradients: Sequence[torch.Tensor], dim: int, num_chunks: int, *, out: "GradientBuffer"
    ) -> None:
        # Here, so of these gradients: parameters without a gradient in this pass are not in FSDP2's list.
        packed = out.reduction.pack(gradients, num_chunks)
        if out.contents or dim != 0 or out.shape != (num_chunks, packed.layout.numel):
            shapes = [tuple(gradient.shape) for gradient in gradients]
            raise _unknown(
                f"gradients of shapes {shapes} were copied in {num_chunks} chunks of dimension {dim} into FSDP2's flat "
                f"buffer of shape {tuple(out.shape)}, with {len(out.contents)} before them"
            )
        out.contents.append(packed)


class Float8ReduceScatter:
    """FSDP2's ``ReduceScatter`` of one module, which sends float8.

    Attributes:
        before: the one that this one replaced.
        measured: float64, (2,): the squares of the last measured sum and of its error, over all ranks; None before.
        measure_next: measure the next reduction that no CUDA graph records, whichever it is, if any are measured.
    """

    def __init__(self, before: Any, hops: Hops | None, measure_every: int) -> None:
        self.before, self._hops, self._measure_every = before, hops, measure_every
        self._input: list[Packed] = []
        self._calls = 0
        self.measured: torch.Tensor | None = None
        self.measure_next = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Return the input; once it is filled, the output. One that was filled in a pass that failed is forgotten."""
        filled, self._input = self._input, []
        if filled and math.prod(size) == filled[0].layout.numel:
            return torch.empty(*size, dtype=dtype, device=device)
        like = torch.empty(*size, dtype=dtype, device="meta")
        return GradientBuffer.of(self, self._input, like, torch.device(device))

    @property
    def _measures(self) -> bool:
        return self._measure_every > 0 and (self._calls % self._measure_every == 0 or self.measure_next)

    def _count(self) -> None:
        self._calls += 1

    def _why_launched(self) -> str | None:
        return "the reduction of gradients is measured" if self._measures else None

    def pack(self, gradients: Sequence[torch.Tensor], ranks: int) -> Packed:
        """Return this rank's gradients as they are sent."""
        # With two hops the first one sends bfloat16 within the host, where bytes cost little.
        layout = layout_of(tuple(chunk_size(g.shape, ranks) for g in gradients), codes=self._hops is None)
        sources = [
            GradientChunks(gradient.detach().contiguous().view(-1), chunk.size, gradient.numel())
            for gradient, chunk in zip(gradients, layout.chunks, strict=True)
        ]
        hosts = 1 if self._hops is None else self._hops.across.size()
        wire = pack(sources, layout, ranks, hosts)
        exact = None
        # A replay is not counted, and what one measured would be told once.
        if is_capturing(wire):
            if (capture := current_capture()) is not None:
                capture.launch_if(self._why_launched)
                capture.after_replay(self._count)
            return Packed(layout, wire, None)
        if self._measures:
            self.measure_next = False
            exact = torch.empty(ranks * layout.numel, dtype=torch.float32, device=wire.device)
            chunk_cat(gradients, ranks, exact.view(ranks, -1))
        self._count()
        return Packed(layout, wire, exact)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: Any,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Exchange the bytes, and write the sum that ``op`` asks for."""
        if not isinstance(input_tensor, GradientBuffer) or len(input_tensor.contents) != 1:
            raise _unknown(
                f"FSDP2 reduced a {type(input_tensor).__name__} that it did not fill with gradients"
            )
        packed = input_tensor.contents[0]
        if output_tensor.numel() != packed.layout.numel:
            raise _unknown(
                f"FSDP2 reduced {packed.layout.numel} elements of a rank to {output_tensor.numel()}"
            )
        # The mean over all ranks, also where sums go in two hops.
        factor = factor_of(op, group.size()) / packed.divisor
        layout, wire, ranks = packed.layout, packed.wire, group
        if self._hops is not None:
            layout, wire = self._to_hosts(layout, wire, self._hops)
            ranks = self._hops.across
        add(_exchanged(wire, ranks), layout, factor, output_tensor)
        if packed.exact is not None:
            self._measure(packed.exact, output_tensor, factor, group)

    def _to_hosts(self, layout: Layout, wire: torch.Tensor, hops: Hops) -> tuple[Layout, torch.Tensor]:
        """Sum over this host's ranks, which send bfloat16, and return float8 of the sums for all hosts."""
        hosts, width = hops.across.size(), layout.numel
        # First hop [ranks of a host, hosts * row_bytes]: each rank gets what its host has
        # for one local place on all hosts.
        received = _exchanged(wire.view(hops.within.size(), -1), hops.within)
        chunks = tuple(
            Chunk(chunk.size, host * layout.row_bytes + chunk.code_at, 0, host * width + chunk.out_at)
            for host in range(hosts)
            for chunk in layout.chunks
        )
        # float32 sums [hosts * width], quantized again below: the second of the two roundings.
        sums = torch.empty(hosts * width, dtype=torch.float32, device=wire.device)
        add(received, Layout(chunks, False, received.shape[1], hosts * width), 1.0, sums)
        coded = layout_of(tuple(chunk.size for chunk in layout.chunks))
        sources = [
            GradientChunks(sums[chunk.out_at :], width, (hosts - 1) * width + chunk.size)
            for chunk in layout.chunks
        ]
        return coded, pack(sources, coded, hosts)

    def _measure(
        self, exact: torch.Tensor, output: torch.Tensor, factor: float, group: dist.ProcessGroup
    ) -> None:
        # In float32: the error to be measured is that of the codes alone.
        right = torch.empty(output.shape, dtype=torch.float32, device=output.device)
        reduce_scatter(right, exact, group)
        right = (right * factor).double()
        # Where the exact sum is infinite or NaN there is no error to measure.
        error = torch.where(right.isfinite(), output.double() - right, 0.0)
        right = torch.where(right.isfinite(), right, 0.0)
        self.measured = torch.stack([right.square().sum(), error.square().sum()])
        dist.all_reduce(self.measured, group=group)


def _exchanged(wire: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    received = torch.empty_like(wire)
    # No reduce-scatter: collectives would add bytes, and here each byte has its scale elsewhere.
    dist.all_to_all_single(received, wire, group=group)
    return received


_groups: dict[tuple[tuple[int, ...], int], Hops] = {}
"""Those of each shard group and number of ranks of a host: models share them, as FSDP2's own groups."""


def hops_of(
    group: dist.ProcessGroup, device: torch.device, options: tuple[bool, int | None, int]
) -> Hops | None:
    """Return the groups of two hops, None where one is right; a collective in which ranks compare options."""
    (flat, ranks_per_host, _), me = options, dist.get_rank()
    # torchrun's number tells hosts of one name.
    name = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}".encode()
    host = (
        int.from_bytes(hashlib.sha256(name).digest()[:7]) if ranks_per_host is None else me // ranks_per_host
    )
    # The options ride along with the host's number, in one all-gather: ranks that disagree on them
    # would later wait for each other.
    own = torch.tensor([host, *map(int, [o or 0 for o in options])], dtype=torch.int64, device=device)
    found = torch.empty(group.size() * own.numel(), dtype=torch.int64, device=device)
    all_gather(found, own, group)
    rows, ranks = found.view(group.size(), -1).tolist(), dist.get_process_group_ranks(group)
    for rank, row in zip(ranks, rows, strict=True):
        if row[1:] != own[1:].tolist():
            raise Float8RankMismatchError(
                "reduce_gradients_in_float8 was called with different options: flat, ranks_per_host and measure_every "
                f"are {own[1:].tolist()} on rank {me} and {row[1:]} on rank {rank}; give all ranks the same"
            )
    hosts = list(dict.fromkeys(row[0] for row in rows))
    places = [hosts.index(row[0]) for row in rows]
    local = places.count(0)
    if flat or len(hosts) in (1, len(places)):
        return None
    if places != [host for host in range(len(hosts)) for _ in range(local)]:
        raise Float8ConfigError(
            f"the ranks {ranks} of a shard group are on the hosts {places}, not equally many on each and one after "
            "another, so gradients cannot be added on each host first. One exchange over all of them sends each "
            "gradient of each rank over the network, where a ring sends it once a host: more bytes than in bfloat16. "
            "Order the ranks by hosts, give ranks_per_host, or ask for it with flat=True"
        )
    return _made(tuple(ranks), local)


def _made(ranks: tuple[int, ...], local: int) -> Hops:
    known = _groups.get((ranks, local))
    if known is not None and all(map(is_alive, known)):
        return known
    host, place = divmod(ranks.index(dist.get_rank()), local)
    # Ranks [hosts, local]: this host's row, and this place's column.
    within = new_group(ranks[host * local : (host + 1) * local])
    across = new_group(ranks[place::local])
    _groups[ranks, local] = Hops(within, across)
    return _groups[ranks, local]
