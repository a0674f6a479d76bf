"""Layer 1. Quotients of float32, rounded to nearest as IEEE has it, without a branch.

ptxas makes the same multiplications of an IEEE division, but behind a look at its operands and a branch to numbers out
of range, and for each quotient of one divisor anew. Here nothing is to be out of range: neither a divisor, nor its
reciprocal, nor a quotient of ``divided`` is subnormal or overflows.
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
    """Of float32 from 2**-126 to 2**126, and infinity: off by a last bit at most. Source: PTX ISA, rcp.approx.f32."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def minus(x):
    """-0 of 0, of which Triton's own minus makes 0 - 0."""
    return x * -1.0


@triton.jit
def refined(over_divisor, divisor):
    """A reciprocal to take quotients with, of an approximate one."""
    return tl.fma(over_divisor, tl.fma(minus(divisor), over_divisor, 1.0), over_divisor)


@triton.jit
def quotient(dividend, divisor, over_divisor):
    """Of a divisor whose ``refined`` reciprocal is known. Source: what ptxas 12.8 makes of div.rn.f32.

    The remainder is negated, and so is what it is multiplied by: a dividend of -0 keeps its sign.
    """
    near = dividend * over_divisor
    return tl.fma(tl.fma(divisor, near, minus(dividend)), minus(over_divisor), near)


@triton.jit
def divided(dividend, divisor):
    """``dividend / divisor``."""
    return quotient(dividend, divisor, refined(approximate_reciprocal(divisor), divisor))
