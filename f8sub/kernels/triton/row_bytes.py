"""Kernel that dequantizes rows whose scales lie behind their codes."""

import triton
import triton.language as tl

from f8sub.kernels.triton.tile_ops import NAN


@triton.jit(do_not_specialize=["M"])
def values_of_rows(
    bytes_ptr, count_ptr, out_ptr, M, N, STRIDE,
    SOURCE: tl.constexpr, ALONG: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write ``codes * scale_inv`` of each row, (M, N); nothing from row ``count`` on, unless its pointer is None.

    A row has N codes, and then a float32 scale for each ALONG of them, or one for all if ALONG is 0. It begins STRIDE
    bytes after the one before. TOP is the largest number of the result's dtype.
    """
    first = tl.program_id(0) * ROWS
    count = M
    if count_ptr is not None:
        count = tl.minimum(tl.load(count_ptr).to(tl.int32), M)
    i = first + tl.arange(0, ROWS)
    inside = i < count
    if first < count:
        line = bytes_ptr + i.to(tl.int64)[:, None] * STRIDE
        scales = (bytes_ptr + i.to(tl.int64) * STRIDE + N).to(tl.pointer_type(tl.float32))
        for begin in range(0, N, COLS):
            j = begin + tl.arange(0, COLS)
            here = inside[:, None] & (j < N)[None, :]
            codes = tl.load(line + j[None, :], mask=here, other=0)
            which = 0 if ALONG == 0 else begin // ALONG
            scale_inv = tl.load(scales + which, mask=inside, other=0.0)
            values = codes.to(SOURCE, bitcast=True).to(tl.float32) * scale_inv[:, None]
            values = tl.clamp(values, -TOP, TOP, propagate_nan=NAN)
            pointers = out_ptr + i.to(tl.int64)[:, None] * N + j[None, :]
            tl.store(pointers, values.to(out_ptr.dtype.element_ty), mask=here)
