"""Turns gradients into bytes for each rank, and received bytes into their sum: by Triton on a GPU, else in PyTorch.

[Note] A block is 128 elements of one gradient that go to one rank. Its exponent is that of the smallest power of two
with which the largest finite element is at most 416, so scaling is exact and an element is rounded once. e4m3 is chosen
for its range: Adam divides each element by its own size, and integers or e3m4 lose most of the small ones. Two codes
are taken from the largest numbers: 0x7E is infinity and 0x7F is NaN. So both arrive at exactly their elements and their
neighbours keep their bits.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from f8sub.capture import Place, addresses_on, keep_for_replays, place_of, programs_on
from f8sub.errors import Float8ConfigError
from f8sub.kernels.triton import support

if TYPE_CHECKING:
    from f8sub.kernels.triton.launch import Launch


BLOCK = 128
"""Elements that share an exponent: 1/128 byte an element, and all of them are of one row of a usual weight."""

ALIGNMENT = 16
"""Bytes: the widest access of a GPU's thread. Each chunk's codes and each row begin at multiples of it."""


class Chunk(NamedTuple):
    """The ``size`` elements of one gradient that one rank keeps.

    Their codes begin at byte ``code_at`` of a row of the wire, their exponents at byte ``scale_at``, and their sum at
    element ``out_at`` of FSDP2's flat output.
    """

    size: int
    code_at: int
    scale_at: int
    out_at: int

    @property
    def blocks(self) -> int:
        """The number of blocks, each of which has an exponent."""
        return -(-self.size // BLOCK)


class Layout(NamedTuple):
    """Describes a row of the wire, what one rank sends one other: ``row_bytes`` bytes for ``numel`` elements.

    ``chunks`` are in FSDP2's order. With ``codes`` elements are e4m3 with exponents; else they are bfloat16.
    """

    chunks: tuple[Chunk, ...]
    codes: bool
    row_bytes: int
    numel: int


@functools.lru_cache(maxsize=1024)
def layout_of(sizes: tuple[int, ...], *, codes: bool = True) -> Layout:
    """Return the row of chunks of these sizes: all elements, then all exponents, each chunk with blocks of its own."""
    width, chunks = 1 if codes else 2, []
    begins = [0, *itertools.accumulate(_aligned(width * size) for size in sizes)]
    at = begins[-1]
    for size, begin, out in zip(sizes, begins, itertools.accumulate(sizes, initial=0), strict=False):
        chunks.append(Chunk(size, begin, at if codes else 0, out))
        at += chunks[-1].blocks if codes else 0
    return Layout(tuple(chunks), codes, _aligned(at), sum(sizes))


def chunk_size(shape: Sequence[int], world: int) -> int:
    """Return the elements of a gradient that each rank keeps, with padded rows.

    Source: FSDP2's ``_get_dim0_padded_size``.
    """
    return -(-shape[0] // world) * math.prod(shape[1:])


def _aligned(bytes: int) -> int:
    return -(-bytes // ALIGNMENT) * ALIGNMENT


INFINITY, NAN = 0x7E, 0x7F
TOP_EXPONENT, TOP_MANTISSA = 8, 0x500000
"""416 = 1.625 * 2**8, the largest code below those of infinity and NaN."""

LARGEST = 1.875 * 2.0**127
"""The largest float32 number with e4m3's digits. Those that are nearer to 2**128 would be decoded to infinity."""


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and exponents, uint8, (rows, size) and (rows, ceil(size / 128)), of x, float32, (rows, size)."""
    size = x.shape[-1]
    # Finite values above 3.2e38 become that largest code, and so stay finite.
    finite = torch.where(x.isfinite(), x.clamp(-LARGEST, LARGEST), 0.0)
    blocks = F.pad(finite, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1).view(torch.int32)
    exponent = (largest >> 23) - TOP_EXPONENT + ((largest & 0x7FFFFF) > TOP_MANTISSA).to(torch.int32)
    exponent = exponent.clamp(1, 254)  # of finite float32, biased by 127
    # The scale is the inverse power of two, whose biased exponent is 254 less the block's: an exact product.
    scaled = blocks * _power_of_2(254 - exponent)[..., None]
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)[..., :size]
    codes = torch.where(x.isinf(), (x.signbit().to(torch.uint8) << 7) | INFINITY, codes)
    return torch.where(x.isnan(), NAN, codes), exponent.to(torch.uint8)


def decode(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return float32 values, (rows, size), of what ``encode`` returned."""
    size = codes.shape[-1]
    values = codes.view(torch.float8_e4m3fn).float()
    values = torch.where(codes & 0x7F == INFINITY, values * torch.inf, values)
    blocks: torch.Tensor = F.pad(values, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
    return (blocks * _power_of_2(exponents.to(torch.int32))[..., None]).flatten(-2)[..., :size]


def _power_of_2(biased: torch.Tensor) -> torch.Tensor:
    return (biased * 2**23).view(torch.float32)


PACKED, TILE, ADDED = 64, 16, 16
"""Blocks that a program casts, how many at a time, and that it adds; the fastest on an H100 (bench/gradients.py)."""


def pack_launches(
    sources: "Sequence[GradientChunks]", layout: Layout, hosts: int, out: torch.Tensor
) -> "list[Launch]":
    """Return the launches that fill ``out``, one for each dtype and alignment; see ``pack``."""
    from f8sub.gradients import triton_kernels
    from f8sub.kernels.triton import quantize_launch

    # A launch is compiled for one dtype, and for addresses that are all multiples of 16 or not.
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
        arguments = {"sources_ptr": addresses_on(out, addresses), "ELEMENT": quantize_launch.INPUTS[dtype]}
        arguments |= {"RANKS": out.shape[0], "HOSTS": hosts, "TILE": TILE}
        made.append(_launch(triton_kernels.pack_chunks, chosen, layout, out, aligned, arguments))
    return made


def add_launches(received: torch.Tensor, layout: Layout, factor: float, out: torch.Tensor) -> "list[Launch]":
    """Return the launches that fill ``out``, one for each alignment; see ``add``."""
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
    tables = table, of_program = _tables(chosen, blocks, ranks, place_of(out))
    keep_for_replays(*tables)
    arguments |= {"chunks_ptr": table, "chunk_of_program_ptr": of_program, "out_ptr": out}
    arguments |= {"row_bytes": layout.row_bytes, "CODES": layout.codes, "ALIGNED": aligned}
    arguments |= {"BLOCKS": blocks, "BLOCK": BLOCK}
    return launch.Launch(kernel, of_program.numel(), arguments, {"num_warps": warps})


@functools.lru_cache(maxsize=512)
def _tables(
    chosen: tuple[tuple[Chunk, int, int], ...], blocks: int, ranks: int, place: Place
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the kernels read of chunks, strides and lengths, and the chunk of each program; both int64 or int32.

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
    return programs_on(place, tuple(rows), counts)


class GradientChunks(NamedTuple):
    """Tells where the chunks of one gradient are read: each rank's begins ``stride`` elements behind the one before.

    ``data`` is float32, bfloat16 or float16, and contiguous; elements behind the first ``length`` are 0.
    """

    data: torch.Tensor
    stride: int
    length: int


def pack(sources: Sequence[GradientChunks], layout: Layout, ranks: int, hosts: int = 1) -> torch.Tensor:
    """Pack what each of ``ranks`` is sent of a source for each chunk: uint8, (ranks, layout.row_bytes).

    Rows are in the order of ranks on their host first, so that equal parts go to the ranks of a host.
    """
    device = sources[0].data.device
    # Nobody reads the bytes between chunks.
    out = torch.empty(ranks, layout.row_bytes, dtype=torch.uint8, device=device)
    if support.takes(out):
        with support.device_of(out):
            for launch in pack_launches(sources, layout, hosts, out):
                launch.run()
        return out
    rows = torch.arange(ranks, device=device, dtype=torch.int64).view(-1, hosts).t().flatten()
    for source, chunk in zip(sources, layout.chunks, strict=True):
        needed = source.stride * (ranks - 1) + chunk.size
        x = F.pad(source.data.flatten()[: source.length].float(), (0, max(0, needed - source.length)))
        # x [ranks, chunk.size], a row for each rank that receives it
        x = x.as_strided((ranks, chunk.size), (source.stride, 1))
        if layout.codes:
            codes, exponents = encode(x)
            out[rows, chunk.scale_at : chunk.scale_at + chunk.blocks] = exponents
        else:
            codes = x.bfloat16().view(torch.uint8)
        out[rows, chunk.code_at : chunk.code_at + codes.shape[1]] = codes
    return out


def add(received: torch.Tensor, layout: Layout, factor: float, out: torch.Tensor) -> None:
    """Write the sum of the rows, added in float32 in their order, times ``factor`` to ``out``, (layout.numel,)."""
    if support.takes(received):
        with support.device_of(out):
            for launch in add_launches(received, layout, factor, out):
                launch.run()
        return
    for chunk in layout.chunks:
        codes = received[:, chunk.code_at : chunk.code_at + chunk.size * (1 if layout.codes else 2)]
        if layout.codes:
            rows = decode(codes, received[:, chunk.scale_at : chunk.scale_at + chunk.blocks])
        else:
            rows = codes.contiguous().view(torch.bfloat16).float()
        # In the ranks' order, as the kernel adds: the same bits on every device.
        total = torch.zeros(chunk.size, dtype=torch.float32, device=out.device)
        for row in rows:
            total += row
        out[chunk.out_at : chunk.out_at + chunk.size] = total * factor
