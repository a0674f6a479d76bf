"""Triton kernels that cast and pack gradients in one pass, and that add what was received in float32 in one pass.

Both walk over the chunks of all gradients of a group by one launch. A tensor of int64 lists the chunks, FIELDS numbers
for each; another one says of each program which chunk it is of.
"""

import triton
import triton.language as tl

FIRST_PROGRAM, SIZE, CODE_AT, SCALE_AT, OUT_AT, STRIDE, LENGTH, FIELDS = map(tl.constexpr, range(8))
"""What the numbers of one chunk say: its first program, and those of ``layout.Chunk`` and ``wire.GradientChunks``."""


@triton.jit
def pack_chunks(
    chunks_ptr, chunk_of_program_ptr, sources_ptr, out_ptr, row_bytes,
    ELEMENT: tl.constexpr, CODES: tl.constexpr, RANKS: tl.constexpr, HOSTS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Cast each rank's chunks into its row of ``out_ptr``: e4m3 data and exponents, or bfloat16.

    A program has BLOCKS blocks of a chunk, TILE of them at a time; the loads of the next two tiles are on their way
    meanwhile. The row of rank (host, local) of (HOSTS, RANKS // HOSTS) is (local, host).
    """
    number = tl.load(chunk_of_program_ptr + tl.program_id(0))
    chunk = chunks_ptr + number * FIELDS
    size, code_at = tl.load(chunk + SIZE), tl.multiple_of(tl.load(chunk + CODE_AT), 16)
    stride, length = tl.load(chunk + STRIDE), tl.load(chunk + LENGTH)
    source = tl.load(sources_ptr + number).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        size, stride, length = (
            tl.multiple_of(size, 16),
            tl.multiple_of(stride, 16),
            tl.multiple_of(length, 16),
        )
    # As many as there are programs, so 32 bits hold them, and what follows; a division of 64 bits takes longer.
    parts = tl.cdiv(size, BLOCKS * BLOCK).to(tl.int32)
    index = tl.program_id(0) - tl.load(chunk + FIRST_PROGRAM).to(tl.int32)
    rank, part = index // parts, index % parts
    row = (rank % (RANKS // HOSTS)) * HOSTS + rank // (RANKS // HOSTS)
    start, first = rank * stride, part.to(tl.int64) * (BLOCKS * BLOCK)
    # ``here``: elements of the chunk in this program. ``given``: those the gradient has;
    # beyond are FSDP2's padding, zeros.
    here = tl.minimum(size - first, BLOCKS * BLOCK).to(tl.int32)
    given = tl.minimum(tl.maximum(length - start - first, 0), here.to(tl.int64)).to(tl.int32)
    if ALIGNED:
        here, given = tl.multiple_of(here, 16), tl.multiple_of(given, 16)
    block = tl.arange(0, TILE)
    i = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    source += start + first
    out = out_ptr + row.to(tl.int64) * row_bytes
    scales = out + tl.load(chunk + SCALE_AT) + first // BLOCK
    codes_at = out + code_at + first
    elements_at = (out + code_at).to(tl.pointer_type(tl.bfloat16), bitcast=True) + first
    for tile in tl.range(0, BLOCKS, TILE, num_stages=3):
        at = tile * BLOCK
        # x [TILE, BLOCK]
        x = tl.load(source + at + i, mask=at + i < given, other=0.0).to(tl.float32)
        if CODES:
            codes, exponent = encoded(x)
            tl.store(codes_at + at + i, codes, mask=at + i < here)
            tl.store(scales + tile + block, exponent, mask=at + block * BLOCK < here)
        else:
            tl.store(elements_at + at + i, x.to(tl.bfloat16), mask=at + i < here)


@triton.jit
def encoded(x):
    """Return e4m3 data and exponents of (TILE, BLOCK) elements, as ``wire.encode`` does."""
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(magnitude, 1)
    # Rare, so most programs do not look at each element: NaN, infinity, and what e4m3 would round up to 2**128.
    is_special = tl.max(largest, 0) >= 0x7F700000
    if is_special:
        largest = tl.max(tl.where(magnitude < 0x7F800000, magnitude, 0), 1)
    # The power of two with which the largest is at most 416 = 1.625 * 2**8, whose mantissa is 0x500000.
    exponent = (largest >> 23) - 8 + ((largest & 0x7FFFFF) > 0x500000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, 1), 254)
    # The inverse of a power of two has the biased exponent 254 - exponent, and multiplying by it is exact.
    scale = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    codes = (x * scale[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    if is_special:
        # 0x7E stands for infinity, and 0x77 for the largest number below 2**128 that e4m3 has with this exponent.
        top = tl.where(magnitude == 0x7F800000, 0x7E, 0x77)
        top = ((x.to(tl.int32, bitcast=True) >> 24) & 0x80 | top).to(tl.uint8)
        codes = tl.where(magnitude >= 0x7F700000, top, codes)
        codes = tl.where(magnitude > 0x7F800000, tl.full(x.shape, 0x7F, tl.uint8), codes)
    return codes, exponent.to(tl.uint8)


@triton.jit
def sum_chunks(
    chunks_ptr, chunk_of_program_ptr, received_ptr, out_ptr, row_bytes, ranks, factor,
    CODES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Add the rows of ``received_ptr`` [ranks, row_bytes] in their order, and write the sum times ``factor``."""
    chunk = chunks_ptr + tl.load(chunk_of_program_ptr + tl.program_id(0)) * FIELDS
    size, out_at = tl.load(chunk + SIZE), tl.load(chunk + OUT_AT)
    code_at, scale_at = tl.multiple_of(tl.load(chunk + CODE_AT), 16), tl.load(chunk + SCALE_AT)
    if ALIGNED:
        size, out_at = tl.multiple_of(size, 16), tl.multiple_of(out_at, 16)
    first = (tl.program_id(0) - tl.load(chunk + FIRST_PROGRAM)) * (BLOCKS * BLOCK)
    here = tl.minimum(size - first, BLOCKS * BLOCK).to(tl.int32)
    if ALIGNED:
        here = tl.multiple_of(here, 16)
    begins, code_at, scale_at, out_at = code_at, code_at + first, scale_at + first // BLOCK, out_at + first
    block = tl.arange(0, BLOCKS)
    i = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    # One accumulator, ranks in order: the bits do not depend on which bytes arrived first.
    total = tl.zeros((BLOCKS, BLOCK), tl.float32)
    # Unrolled, so that the rows of several ranks are on their way at a time.
    for rank in tl.range(0, ranks, loop_unroll_factor=4):
        row = received_ptr + tl.cast(rank, tl.int64) * row_bytes
        if CODES:
            codes = tl.load(row + code_at + i, mask=i < here, other=0)
            exponent = tl.load(row + scale_at + block, mask=block * BLOCK < here, other=1).to(tl.int32)
            values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            values = tl.where((codes & 0x7F) == 0x7E, values * float("inf"), values)
            total += values * (exponent << 23).to(tl.float32, bitcast=True)[:, None]
        else:
            elements = (row + begins).to(tl.pointer_type(tl.bfloat16), bitcast=True) + first
            total += tl.load(elements + i, mask=i < here, other=0.0).to(tl.float32)
    tl.store(out_ptr + out_at + i, (total * factor).to(out_ptr.dtype.element_ty), mask=i < here)
