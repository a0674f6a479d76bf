"""Triton kernels over many tensors: a step of AdamW with the amaxes of the new parameters, and sums of squares.

A tensor of int64 lists the tensors, FIELDS numbers for each; another one says of each program which tensor it steps.
Numbers are those of torch 2.13's fused AdamW: every rounding is written out, so that no compiler chooses one.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.tile_ops import EXPONENT_BITS, magnitude_bits

PARAMETER, FIRST, SECOND, FIRST_PROGRAM, SIZE, SLOT, EVERY, FIELDS = map(tl.constexpr, range(8))
"""What the numbers of one tensor say: the addresses of the parameter and of both moments, its first program, its
elements, and its first entry in the amaxes, -1 for none; how many elements have an entry, 0 for all of them one."""


@triton.jit
def step_many(
    tensors_ptr, tensor_of_program_ptr, gradients_ptr, correction1_ptr, correction2_ptr, amax_ptr,
    lr_ptr, clip_ptr, found_inf_ptr, lr, beta1, beta2, eps, weight_decay,
    OF_PARAMETERS: tl.constexpr, OF_GRADIENTS: tl.constexpr, OF_STATES: tl.constexpr,
    MAXIMIZE: tl.constexpr, DECAY: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Step SPAN elements of a parameter, BLOCK at a time, in float32.

    ``correction1_ptr`` has ``1 - beta1**step`` of each tensor, ``correction2_ptr`` the root of ``1 - beta2**step``.
    Gradients are multiplied by what ``clip_ptr`` points to, where it is not None, and rounded to their dtype. Where
    ``found_inf_ptr`` points to 1, nothing is written but the amax of the parameter as it is.
    """
    number = tl.load(tensor_of_program_ptr + tl.program_id(0))
    tensor = tensors_ptr + number * FIELDS
    start = (tl.program_id(0) - tl.load(tensor + FIRST_PROGRAM)) * SPAN
    count = tl.minimum(tl.load(tensor + SIZE) - start, SPAN).to(tl.int32)
    p_ptr = tl.load(tensor + PARAMETER).to(tl.pointer_type(OF_PARAMETERS))
    g_ptr = tl.load(gradients_ptr + number).to(tl.pointer_type(OF_GRADIENTS))
    m_ptr = tl.load(tensor + FIRST).to(tl.pointer_type(OF_STATES))
    v_ptr = tl.load(tensor + SECOND).to(tl.pointer_type(OF_STATES))
    if ALIGNED:
        p_ptr, g_ptr = tl.multiple_of(p_ptr, 16), tl.multiple_of(g_ptr, 16)
        m_ptr, v_ptr = tl.multiple_of(m_ptr, 16), tl.multiple_of(v_ptr, 16)
        count = tl.multiple_of(count, 16)
    p_ptr, g_ptr, m_ptr, v_ptr = p_ptr + start, g_ptr + start, m_ptr + start, v_ptr + start
    if lr_ptr is not None:
        lr = tl.load(lr_ptr)
    step_size = tl.div_rn(lr, tl.load(correction1_ptr + number))
    correction2 = tl.load(correction2_ptr + number)
    decay = -(lr * weight_decay)
    clip = 1.0
    if clip_ptr is not None:
        clip = tl.load(clip_ptr)
    runs = True
    if found_inf_ptr is not None:
        runs = tl.load(found_inf_ptr) != 1.0
    i = tl.arange(0, BLOCK)
    # Kept elementwise over the whole span, reduced across threads once.
    largest = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, count, BLOCK):
        inside = at + i < count
        p = tl.load(p_ptr + at + i, mask=inside, other=0.0)
        if runs:
            g = tl.load(g_ptr + at + i, mask=inside, other=0.0).to(tl.float32)
            m = tl.load(m_ptr + at + i, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + at + i, mask=inside, other=0.0).to(tl.float32)
            if clip_ptr is not None:
                # torch clips in place, and so rounds what it clips to the dtype of gradients.
                g = (g * clip).to(OF_GRADIENTS).to(tl.float32)
            if MAXIMIZE:
                g = -g
            m = tl.fma(beta1, m, tl.fma(-beta1, g, g))
            v = tl.fma(beta2, v, tl.fma(-beta2, g * g, g * g))
            new = p.to(tl.float32)
            if DECAY:
                new = tl.fma(decay, new, new)
            denominator = tl.div_rn(tl.sqrt_rn(v), correction2) + eps
            p = (new - tl.div_rn(step_size * m, denominator)).to(OF_PARAMETERS)
            tl.store(p_ptr + at + i, p, mask=inside)
            tl.store(m_ptr + at + i, m.to(OF_STATES), mask=inside)
            tl.store(v_ptr + at + i, v.to(OF_STATES), mask=inside)
        # What lies beyond the tensor became NaN where eps is 0.
        largest = tl.maximum(largest, tl.where(inside, magnitude_bits(p.to(tl.float32)), 0))
    slot = tl.load(tensor + SLOT)
    every = tl.load(tensor + EVERY)
    if every > 0:
        # A multiple of SPAN: no program has elements of two.
        slot += start // every
    if slot >= 0:
        # The bits of NaN come after those of infinity: the minimum makes infinity of both, as the amax table has it.
        tl.atomic_max(amax_ptr + slot, tl.minimum(tl.max(largest), EXPONENT_BITS), sem="relaxed")


@triton.jit
def squares_of_many(
    tensors_ptr, tensor_of_program_ptr, gradients_ptr, sums_ptr,
    OF_GRADIENTS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sum the squares of SPAN elements of a tensor, BLOCK at a time, in float32; each program has a sum of its own."""
    number = tl.load(tensor_of_program_ptr + tl.program_id(0))
    tensor = tensors_ptr + number * FIELDS
    start = (tl.program_id(0) - tl.load(tensor + FIRST_PROGRAM)) * SPAN
    count = tl.minimum(tl.load(tensor + SIZE) - start, SPAN).to(tl.int32)
    g_ptr = tl.load(gradients_ptr + number).to(tl.pointer_type(OF_GRADIENTS))
    if ALIGNED:
        g_ptr, count = tl.multiple_of(g_ptr, 16), tl.multiple_of(count, 16)
    g_ptr += start
    i = tl.arange(0, BLOCK)
    # Elementwise over the whole span, so that the sum depends on no order of programs or threads.
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, count, BLOCK):
        g = tl.load(g_ptr + at + i, mask=at + i < count, other=0.0).to(tl.float32)
        total += g * g
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total))
