"""Kernel that copies the chunks of a gradient to where FSDP2 reduces them."""

import triton
import triton.language as tl


@triton.jit
def copy_chunks(source_ptr, out_ptr, length, chunk, stride, BLOCK: tl.constexpr):
    """Copy the chunk of each rank, the ranks' ``stride`` elements apart, and cast it to the dtype of ``out_ptr``.

    A program copies BLOCK elements of one rank's. Past the ``length`` elements of the gradient there are zeros.
    """
    parts = tl.cdiv(chunk, BLOCK)
    rank, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    at = part * BLOCK + tl.arange(0, BLOCK)
    first = rank * chunk
    here = at < chunk
    x = tl.load(source_ptr + first + at, mask=here & (first + at < length), other=0.0)
    tl.store(out_ptr + rank * stride + at, x.to(out_ptr.dtype.element_ty), mask=here)
