"""Quotients of float32, rounded to nearest as IEEE has it, without a branch.

ptxas makes the same multiplications of an IEEE division, but behind a look at its operands and a branch to numbers out
of range. Here nothing is to be out of range: neither a divisor, nor its reciprocal, nor a quotient is subnormal or
overflows.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.ptx import unless_interpreted


@triton.jit
def _plain_reciprocal(x):
    return tl.div_rn(1.0, x)


@unless_interpreted(_plain_reciprocal)
@triton.jit
def approximate_reciprocal(x):
    """Of float32 from 2**-126 to 2**126, off by a last bit at most. Source: PTX ISA, rcp.approx.f32."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def divided(dividend, divisor):
    """``dividend / divisor``, neither of them 0. Source: what ptxas 12.8 makes of div.rn.f32."""
    over_divisor, minus_divisor = approximate_reciprocal(divisor), divisor * -1.0
    over_divisor = tl.fma(over_divisor, tl.fma(minus_divisor, over_divisor, 1.0), over_divisor)
    near = dividend * over_divisor
    return tl.fma(tl.fma(minus_divisor, near, dividend), over_divisor, near)
