"""The launches that pack and add chunks; triton is imported when they are made."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from f8sub.errors import Float8ConfigError
from f8sub.gradients.layout import (
    ALIGNMENT,
    BLOCK,
    Chunk,
    Layout,
)
from f8sub.host_copy import sent_to
from f8sub.torch_compat import is_capturing

if TYPE_CHECKING:
    from f8sub.gradients.wire import Source
    from f8sub.kernels.triton.launch import Launch

PACKED, TILE, ADDED = 64, 16, 16
"""Blocks that a program casts, how many at a time, and that it adds; the fastest on an H100 (bench/gradients.py)."""

_in_graphs: dict[int, torch.Tensor] = {}
"""Tables that CUDA graphs read, by their addresses: kept for good, some kilobytes for each FSDP2 module."""

Place = tuple[torch.device, int]
"""A device and its current stream, on which a table is written before the first kernel that reads it."""


def pack(sources: "Sequence[Source]", layout: Layout, hosts: int, out: torch.Tensor) -> "list[Launch]":
    """The launches that fill ``out``, one for each dtype and alignment; see ``wire.pack``."""
    from f8sub.gradients import triton_kernels
    from f8sub.kernels.triton import quantize_launch

    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for number, (source, chunk) in enumerate(zip(sources, layout.chunks, strict=True)):
        places = chunk.size, source.stride, source.length, source.data.data_ptr()
        aligned = all(place % ALIGNMENT == 0 for place in places)
        if chunk.size:
            kinds.setdefault((source.data.dtype, aligned), []).append(number)
    made = []
    for (dtype, aligned), numbers in kinds.items():
        chosen = tuple((layout.chunks[n], sources[n].stride, sources[n].length) for n in numbers)
        addresses = tuple(sources[n].data.data_ptr() for n in numbers)
        arguments = {"sources_ptr": _addresses(addresses, out), "ELEMENT": quantize_launch.INPUTS[dtype]}
        arguments |= {"RANKS": out.shape[0], "HOSTS": hosts, "TILE": TILE}
        made.append(_launch(triton_kernels.pack_chunks, chosen, layout, out, aligned, arguments))
    return made


def add(received: torch.Tensor, layout: Layout, factor: float, out: torch.Tensor) -> "list[Launch]":
    """The launches that fill ``out``, one for each alignment; see ``wire.add``."""
    from f8sub.gradients import triton_kernels

    kinds: dict[bool, list[tuple[Chunk, int, int]]] = {}
    for chunk in layout.chunks:
        if chunk.size:
            places = chunk.size, chunk.out_at, out.data_ptr()
            aligned = all(place % ALIGNMENT == 0 for place in places)
            kinds.setdefault(aligned, []).append((chunk, 0, 0))
    made = []
    for aligned, chosen in kinds.items():
        arguments = {"received_ptr": received, "ranks": received.shape[0], "factor": factor}
        made.append(_launch(triton_kernels.sum_chunks, tuple(chosen), layout, out, aligned, arguments))
    return made


def _launch(
    kernel: Any,
    chosen: tuple[tuple[Chunk, int, int], ...],
    layout: Layout,
    out: torch.Tensor,
    aligned: bool,
    arguments: dict[str, Any],
) -> "Launch":
    from f8sub.kernels.triton import launch

    packs = "sources_ptr" in arguments
    blocks, ranks, warps = (PACKED if aligned else TILE, out.shape[0], 4) if packs else (ADDED, 1, 2)
    tables = table, of_program = _tables(chosen, blocks, ranks, _place_of(out))
    if is_capturing(out):
        _in_graphs.update((each.data_ptr(), each) for each in tables)
    arguments |= {"chunks_ptr": table, "chunk_of_program_ptr": of_program, "out_ptr": out}
    arguments |= {"row_bytes": layout.row_bytes, "CODES": layout.codes, "ALIGNED": aligned}
    arguments |= {"BLOCKS": blocks, "BLOCK": BLOCK}
    return launch.Launch(kernel, of_program.numel(), arguments, {"num_warps": warps})


@functools.lru_cache(maxsize=512)
def _tables(
    chosen: tuple[tuple[Chunk, int, int], ...], blocks: int, ranks: int, place: Place
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels are told of chunks, strides and lengths, and the chunk of each program.

    Raises:
        Float8ConfigError: it is new, and a CUDA graph is captured, whose replays would read host memory that is freed.
    """
    if place[0].type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Float8ConfigError(
            "a CUDA graph is captured with gradients that reduce_gradients_in_float8 has not reduced before: run "
            "forward and backward once as they will be captured, with the same batch size and the same parameters, "
            "and then capture them"
        )
    rows: list[tuple[int, ...]] = []
    counts: list[int] = []
    for chunk, stride, length in chosen:
        rows.append((sum(counts), *chunk, stride, length))
        counts.append(ranks * -(-chunk.blocks // blocks))
    numbers = torch.arange(len(rows), dtype=torch.int32, device="cpu")
    of_program = numbers.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device="cpu"))
    return _table(tuple(rows), place), sent_to(place[0], of_program)


def _addresses(numbers: tuple[int, ...], out: torch.Tensor) -> torch.Tensor:
    """Addresses as a kernel reads them, int64. A CUDA graph writes them itself, from the arguments of a kernel.

    Its gradients have addresses that no step before had, and a copy from host memory would be replayed from there.
    """
    if not is_capturing(out):
        return _table(numbers, _place_of(out))
    table = torch.zeros(len(numbers), dtype=torch.int64, device=out.device)
    torch._foreach_add_(list(table.unbind()), list(numbers))
    return table


@functools.lru_cache(maxsize=1024)
def _table(numbers: tuple[Any, ...], place: Place) -> torch.Tensor:
    return sent_to(place[0], numbers)


def _place_of(out: torch.Tensor) -> Place:
    return out.device, torch.cuda.current_stream(out.device).cuda_stream if out.is_cuda else 0
