"""Layer 1. SwiGLU and its codes of rows: ``silu(gate) * up`` goes to memory in float8 alone.

Rounded where torch's eager operators round, with CUDA's own exponential and IEEE quotients, so that the elements are
torch's. What is made twice, for an amax and to be cast, is made of gate and up both times.

Both quotients, gate and 1 over ``1 + exp(-gate)``, are made of one reciprocal and without a branch, as division.py has
it: the IEEE divisions were a quarter to a third of the kernels' instructions. Some dividends and quotients are
subnormal; those of all gates of half precision were tried (tests/kernels/test_quotients.py).
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from f8sub.kernels.triton.division import approximate_reciprocal, minus, quotient, refined
from f8sub.kernels.triton.tiles import (
    EXPONENT_BITS,
    LARGEST_FINITE,
    codes,
    finite_or_nan,
    inverse,
    magnitude_bits,
    place,
    scale_from_amax,
    scale_from_past,
    scaled,
)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 elements as they are once they were stored as DTYPE."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def silu_and_sigmoid(gate):
    """float32, of float32 elements that a bfloat16 or float16 holds, as torch divides; infinity is 2^128 - 2^104."""
    # A quarter of 1 + exp(-gate), so that no reciprocal is subnormal.
    divisor = tl.fma(libdevice.exp(minus(gate)), 0.25, 0.25)
    over_divisor = approximate_reciprocal(divisor)
    # Where the exponential overflows quotients are 0, as the reciprocal is, not NaN.
    divisor = tl.minimum(divisor, LARGEST_FINITE)
    over_divisor = refined(over_divisor, divisor)
    silu = quotient(tl.minimum(gate, LARGEST_FINITE) * 0.25, divisor, over_divisor)
    return silu, quotient(0.25, divisor, over_divisor)


@triton.jit
def swiglu(gate, up, DTYPE: tl.constexpr):
    """``silu(gate) * up`` of float32 elements."""
    silu, _ = silu_and_sigmoid(gate)
    return rounded(rounded(silu, DTYPE) * up, DTYPE)


@triton.jit
def swiglu_and_gradients(dh, gate, up, DTYPE: tl.constexpr):
    """``silu(gate) * up``, and the gradients of gate and of up."""
    silu, sigmoid = silu_and_sigmoid(gate)
    silu = rounded(silu, DTYPE)
    dgate = rounded(dh * up, DTYPE) * sigmoid * tl.fma(gate, 1.0 - sigmoid, 1.0)
    return rounded(silu * up, DTYPE), rounded(dgate, DTYPE), rounded(dh * silu, DTYPE)


@triton.jit
def load_pair(gate_ptr, up_ptr, at, inside, WHOLE: tl.constexpr, KEEP: tl.constexpr):
    """Elements of gate and up, float32; WHOLE says that all are inside."""
    if WHOLE:
        gate = tl.load(gate_ptr + at, eviction_policy=KEEP)
        up = tl.load(up_ptr + at, eviction_policy=KEEP)
    else:
        gate = tl.load(gate_ptr + at, mask=inside, other=0.0, eviction_policy=KEEP)
        up = tl.load(up_ptr + at, mask=inside, other=0.0, eviction_policy=KEEP)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def store_codes(out_ptr, made, at, inside, WHOLE: tl.constexpr):
    """Codes to where ``load_pair`` found what they are of."""
    if WHOLE:
        tl.store(out_ptr + at, made)
    else:
        tl.store(out_ptr + at, made, mask=inside)


@triton.jit
def keep_amax(amax_ptr, x):
    """Maximum with what is there of finite elements."""
    bits = magnitude_bits(x)
    tl.atomic_max(amax_ptr, tl.max(tl.where(bits < EXPONENT_BITS, bits, 0)), sem="relaxed")


@triton.jit
def amax_of_swiglu(gate_ptr, up_ptr, amax_ptr, past_ptr, SIZE, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Maximum with what is there; left alone where ``past_ptr`` points to a scale that is not 0."""
    needed = past_ptr is None
    if past_ptr is not None:
        needed = tl.load(past_ptr) == 0.0
    if needed:
        start, offsets = tl.program_id(0).to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
        gate, up = load_pair(gate_ptr + start, up_ptr + start, offsets, offsets < SIZE - start, WHOLE, "")
        keep_amax(amax_ptr, swiglu(gate, up, gate_ptr.dtype.element_ty))


@triton.jit
def cast_swiglu_with_one(
    gate_ptr,
    up_ptr,
    amax_ptr,
    past_ptr,
    largest_ptr,
    scale_ptr,
    row_ptr,
    row_scale_inv_ptr,
    SIZE,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    HEADROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Codes with the scale of the amax, or of the past as ``cast_with_one`` has it; the scale and its inverse."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    start, offsets = index.to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    inside = offsets < SIZE - start
    gate, up = load_pair(gate_ptr + start, up_ptr + start, offsets, inside, WHOLE, "evict_first")
    h = swiglu(gate, up, gate_ptr.dtype.element_ty)
    amax = tl.load(amax_ptr)
    if past_ptr is None:
        scale = scale_from_amax(amax, TOP, POWER_OF_2)
    else:
        scale = scale_from_past(tl.load(past_ptr), amax, TOP, POWER_OF_2, HEADROOM, False)
        tl.atomic_max(largest_ptr, tl.max(magnitude_bits(h)), sem="relaxed")
    made = codes(scaled(finite_or_nan(h), scale, TOP, past_ptr is not None), CODES)
    store_codes(row_ptr + start, made, offsets, inside, WHOLE)
    tl.store(scale_ptr, scale, mask=index == 0)
    tl.store(row_scale_inv_ptr, inverse(scale, POWER_OF_2 and past_ptr is None), mask=index == 0)


@triton.jit
def quantize_swiglu_rows(
    gate_ptr,
    up_ptr,
    row_ptr,
    row_scale_inv_ptr,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    PART: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One scale a row: a row a program, read for its amax, kept in L2, read again."""
    start, j = tl.program_id(0).to(tl.int64) * N, tl.arange(0, PART)
    parts = tl.cdiv(N, PART)
    largest = tl.zeros((PART,), tl.float32)
    for part in range(parts):
        at = part * PART + j
        gate, up = load_pair(gate_ptr + start, up_ptr + start, at, at < N, WHOLE, "evict_last")
        h = swiglu(gate, up, gate_ptr.dtype.element_ty)
        largest = tl.maximum(largest, tl.abs(finite_or_nan(h)))
    scale = scale_from_amax(tl.max(largest), TOP, POWER_OF_2)
    tl.store(row_scale_inv_ptr + tl.program_id(0), inverse(scale, POWER_OF_2))
    for done in range(parts):
        at = (parts - 1 - done) * PART + j
        gate, up = load_pair(gate_ptr + start, up_ptr + start, at, at < N, WHOLE, "evict_first")
        h = finite_or_nan(swiglu(gate, up, gate_ptr.dtype.element_ty))
        store_codes(row_ptr + start, codes(scaled(h, scale, TOP, False), CODES), at, at < N, WHOLE)


@triton.jit
def quantize_short_swiglu_rows(
    gate_ptr,
    up_ptr,
    row_ptr,
    row_scale_inv_ptr,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    PART: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One scale a row of at most PART elements: a row a program, which makes it once and holds it in registers."""
    start, j = tl.program_id(0).to(tl.int64) * N, tl.arange(0, PART)
    gate, up = load_pair(gate_ptr + start, up_ptr + start, j, j < N, WHOLE, "evict_first")
    h = finite_or_nan(swiglu(gate, up, gate_ptr.dtype.element_ty))
    scale = scale_from_amax(tl.max(tl.abs(h)), TOP, POWER_OF_2)
    store_codes(row_ptr + start, codes(scaled(h, scale, TOP, False), CODES), j, j < N, WHOLE)
    tl.store(row_scale_inv_ptr + tl.program_id(0), inverse(scale, POWER_OF_2))


@triton.jit
def load_tile(gate_ptr, up_ptr, row, col, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr):
    """``finite_or_nan`` elements of the (ROWS, COLS) tile at (row, col), offsets of them all, which are inside."""
    i, j = tl.arange(0, ROWS), tl.arange(0, COLS)
    at = row.to(tl.int64) * N + col + i[:, None] * N + j[None, :]
    inside = (row + i < M)[:, None] & (col + j < N)[None, :]
    gate, up = load_pair(gate_ptr, up_ptr, at, inside, WHOLE, "")
    return finite_or_nan(swiglu(gate, up, gate_ptr.dtype.element_ty)), at, inside


@triton.jit
def quantize_swiglu_vectors(
    gate_ptr,
    up_ptr,
    row_ptr,
    row_scale_inv_ptr,
    M,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Tiles of 1 x COLS, ROWS of them a program. Scales are (tiles, M), as ``quantize_vectors`` has them."""
    row, col = place(tl.program_id(0), M, N, ROWS, COLS)
    h, at, inside = load_tile(gate_ptr, up_ptr, row, col, M, N, ROWS, COLS, WHOLE)
    scale = scale_from_amax(tl.max(tl.abs(h), 1), TOP, POWER_OF_2)
    store_codes(row_ptr, codes(scaled(h, scale[:, None], TOP, False), CODES), at, inside, WHOLE)
    i = row + tl.arange(0, ROWS)
    scales = row_scale_inv_ptr + (col // COLS).to(tl.int64) * M + i
    tl.store(scales, inverse(scale, POWER_OF_2), mask=i < M)


@triton.jit
def quantize_swiglu_squares(
    gate_ptr,
    up_ptr,
    row_ptr,
    row_scale_inv_ptr,
    M,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EDGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Tiles of EDGE x EDGE, one program each, in parts of (ROWS, COLS): for the amax, and last one first to be cast."""
    row, col = place(tl.program_id(0), M, N, EDGE, EDGE)
    IN_A_ROW: tl.constexpr = EDGE // COLS
    PARTS: tl.constexpr = EDGE // ROWS * IN_A_ROW
    largest = tl.zeros((ROWS, COLS), tl.float32)
    for part in range(PARTS):
        part_row, part_col = row + part // IN_A_ROW * ROWS, col + part % IN_A_ROW * COLS
        h, _, _ = load_tile(gate_ptr, up_ptr, part_row, part_col, M, N, ROWS, COLS, WHOLE)
        largest = tl.maximum(largest, tl.abs(h))
    scale = scale_from_amax(tl.max(largest), TOP, POWER_OF_2)
    for done in range(PARTS):
        part = PARTS - 1 - done
        part_row, part_col = row + part // IN_A_ROW * ROWS, col + part % IN_A_ROW * COLS
        h, at, inside = load_tile(gate_ptr, up_ptr, part_row, part_col, M, N, ROWS, COLS, WHOLE)
        store_codes(row_ptr, codes(scaled(h, scale, TOP, False), CODES), at, inside, WHOLE)
    tl.store(row_scale_inv_ptr + row // EDGE * tl.cdiv(N, EDGE) + col // EDGE, inverse(scale, POWER_OF_2))
