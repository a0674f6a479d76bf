"""Quantize by the fastest kernel that takes it: a matrix, tokens in groups, weights of experts.

All kernels agree to the bit. In compiled code what the compiler must not look into is one node, see ``ops.py``. Where
groups lie is never read on the host.

Eager code on a CPU quantizes with one scale a tensor in 5 operators instead of the reference's 20: it reads the amax
and computes the scale on the host. Reading a tensor's value waits for nothing there; an accelerator's stream it would
stall.
"""

import ctypes
import math
from typing import overload

import torch

from f8sub.formats import Float8Format, Operand, ScaleRule
from f8sub.kernels import cuda, ops, reference
from f8sub.kernels.grouped import operands
from f8sub.kernels.grouped.operands import (
    Computed,
    ExpertWeights,
    Groups,
    QuantizedTokens,
    quantize_with_prior,
)
from f8sub.kernels.reference import Quantized
from f8sub.kernels.scales import CURRENT, PriorScale, ScaleSource, largest_scale, smallest_scale
from f8sub.torch_compat import no_dispatch_modes

with torch.inference_mode(mode=False), no_dispatch_modes():  # whatever f8sub is imported in
    _MINUS_ZERO = torch.full((1, 1), -0.0, dtype=torch.float32, device="cpu")
    _ONE = torch.ones((1, 1), dtype=torch.float32, device="cpu")

_LARGEST_SCALE = largest_scale()


def quantize_on_cpu(
    x: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    any_layout: bool = False,
    prior: PriorScale | None = None,
) -> Quantized:
    """``reference.quantize``; goes there for finer tiles, two formats, and tensors that are not plain or not finite.

    With scales of the current amax nothing is clamped: a finite product is at most ``format.max * (1 + 2**-23)``, which
    rounds to ``format.max``.
    """
    format = columnwise if rowwise is None else rowwise
    if (
        format is None
        or not (format.is_plain and format.tile.is_whole)
        or not (columnwise is None or columnwise is format or columnwise == format)
        or not x.numel()
        or not x.is_contiguous()
    ):
        return reference.quantize(x, rowwise, columnwise, any_layout, prior)
    # One pass, where ``abs`` would write a copy first.
    lowest, highest = torch.aminmax(x)
    amax: float = max(highest.item(), -lowest.item())
    # NaN fails this comparison, too.
    if not amax < math.inf:
        return reference.quantize(x, rowwise, columnwise, any_layout, prior)
    scale = scale_from_amax(amax, format) if prior is None else scale_now(prior, amax, format)
    # -0 + scale * x is the float32 product of a bfloat16 x, signed zeros too, in one operator.
    scaled = torch.add(_MINUS_ZERO, x, alpha=scale)
    if prior is not None and amax * scale > format.max:
        scaled = scaled.clamp_(-format.max, format.max)
    data = scaled.to(format.dtype)
    scale_inv = _matrix_of(1.0 / scale)
    row = col = None
    if rowwise is not None:
        row = Operand(data, scale_inv, format)
    if columnwise is not None:
        col = Operand(data.t() if any_layout else torch.t_copy(data), scale_inv, format)
    return Quantized(row, col, None if prior is None else _matrix_of(amax))


def _matrix_of(number: float) -> torch.Tensor:
    # float32, (1, 1), by the operator that has just cast: half of what a small operator costs is code that the caches
    # do not hold, and ``torch.full`` is other code. So is ``mT``, where the GEMM calls ``t()``.
    return torch.add(_MINUS_ZERO, _ONE, alpha=number)


def scale_from_amax(amax: float, format: Float8Format) -> float:
    """``scales.scale_from_amax`` of one finite number; a Python float that float32 holds exactly."""
    if amax == 0.0:
        return 1.0
    scale: float = ctypes.c_float(min(format.max / amax, _LARGEST_SCALE)).value
    if format.scale_rule is not ScaleRule.FLOAT and format.scale_rule.is_power_of_2:
        scale = math.ldexp(0.5, math.frexp(scale)[1])
    return scale


def scale_now(prior: PriorScale, amax: float, format: Float8Format) -> float:
    """``scales.scale_now`` of one finite number."""
    scale: float = prior.scale.item()
    if scale == 0.0:
        scale = max(scale_from_amax(amax * 2.0**prior.margin, format), smallest_scale())
    if prior.covers and amax != 0.0:
        scale = min(scale, scale_from_amax(amax, format))
    return scale


@overload
def quantize(
    x: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    source: ScaleSource = CURRENT,
    any_layout: bool = False,
    groups: None = None,
    multiple: int = 1,
) -> Quantized: ...


@overload
def quantize(
    x: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    source: ScaleSource = CURRENT,
    any_layout: bool = False,
    groups: Groups = ...,
    multiple: int = 1,
) -> QuantizedTokens: ...


def quantize(
    x: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    source: ScaleSource = CURRENT,
    any_layout: bool = False,
    groups: Groups | None = None,
    multiple: int = 1,
) -> Quantized | QuantizedTokens:
    """``reference.quantize`` with the scales of ``source``; of groups ``operands.quantize_tokens``.

    Compiled code is always row-major: Inductor's lowering of ``_scaled_mm`` takes nothing else. Where the GEMMs take
    nothing else either, not ``any_layout``, it calls our kernels for what is copied transposed.

    Args:
        x: (M, K), in high precision.
        rowwise: format of the operand stored as ``x``; None to leave it out.
        columnwise: the same, stored as ``x.t()``.
        source: of scales; with prior scales of groups, (E, 1), both formats are one.
        any_layout: see ``reference.quantize``.
        groups: of rows that have scales of their own: tiles that span all rows end with their group. None for one.
        multiple: groups of columnwise codes begin at multiples of it where their tiles do not need more.
    """
    prior, reduce = source.prior(), source.reduce
    if groups is not None:
        if rowwise is None and columnwise is None:
            return QuantizedTokens(None, None)
        if prior is not None:
            return quantize_with_prior(x, groups, rowwise, columnwise, multiple, prior)
        if torch.compiler.is_compiling():
            return QuantizedTokens(*ops.quantized_groups(x, groups, rowwise, columnwise, multiple))
        kernel = operands.quantize_both if x.is_cpu else cuda.quantize_tokens
        return QuantizedTokens(*kernel(x, groups, rowwise, columnwise, multiple))
    if torch.compiler.is_compiling():
        is_copied = columnwise is not None and not any_layout
        formats = [format for format in (rowwise, columnwise) if format is not None]
        is_fusible = prior is not None or all(map(ops.is_fusible, formats))
        if reduce is None and (is_copied or not is_fusible):
            return ops.quantized(x, rowwise, columnwise, prior)
        # The compiler fuses the reference with what is around it.
        return ops.with_copied_columns(reference.quantize(x, rowwise, columnwise, True, prior, reduce))
    # A collective stands between the amax and the cast, so no kernel does both.
    if reduce is not None:
        return reference.quantize(x, rowwise, columnwise, any_layout, prior, reduce)
    # Of this very class: fake tensors and other subclasses have no value for the host to read.
    if type(x) is torch.Tensor and x.is_cpu:
        return quantize_on_cpu(x, rowwise, columnwise, any_layout, prior)
    return cuda.quantize(x, rowwise, columnwise, any_layout, prior)


def quantize_computed(
    computed: Computed,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    groups: Groups,
    multiple: int,
) -> QuantizedTokens:
    """``quantize`` of tokens that are computed where they are cast, with scales of their current amaxes."""
    if rowwise is None and columnwise is None:
        return QuantizedTokens(None, None)
    if torch.compiler.is_compiling():
        return QuantizedTokens(*ops.quantized_computed(computed, groups, rowwise, columnwise, multiple))
    kernel = operands.quantize_computed if computed[0].is_cpu else cuda.quantize_computed
    return QuantizedTokens(*kernel(computed, groups, rowwise, columnwise, multiple))


def derive_columnwise_in_backward(
    rowwise: Operand, columnwise: Float8Format, after: torch.Tensor, any_layout: bool = False
) -> Operand:
    """``reference.derive_columnwise`` that a compiled graph cannot move into the forward pass.

    Derived from a weight alone, the transposed copy would depend on nothing of the backward pass: a partitioner
    hoists it and saves an unsharded weight for every layer (pytorch/ao#936). Taking ``after`` ties it down.

    Args:
        rowwise: (N, K) codes of the weight.
        columnwise: format of the (K, N) result.
        after: a small tensor, because all of it stays in memory, made in the backward pass; its values are not read.
        any_layout: see ``reference.quantize``; compiled code is always row-major.
    """
    if torch.compiler.is_compiling():
        return ops.derived_in_backward(rowwise, columnwise, after, any_layout)
    reference.refuse_freed(rowwise.data)
    if any_layout:
        return reference.derive_columnwise(rowwise, columnwise, any_layout)
    return cuda.derive_columnwise(rowwise, columnwise)


def small_part_of(dy: torch.Tensor, quantized: Operand | None) -> torch.Tensor:
    """``after`` of ``derive_columnwise_in_backward``: what is not known before ``dy``, (rows, cols), is.

    ``quantized`` is an operand of ``dy`` with scales of its current amax, if there is one.
    """
    if not torch.compiler.is_compiling():
        return dy
    return dy[:1, :1] if quantized is None else quantized.scale_inv


def quantize_experts(w: torch.Tensor, format: Float8Format) -> ExpertWeights:
    """Rowwise codes of all experts, (E, N, K): ``operands.quantize_weights``."""
    if torch.compiler.is_compiling():
        codes, scale_inv = ops.experts_as_one_node(w, format.name)
        return ExpertWeights(codes, scale_inv, format)
    return operands.quantize_weights(w, format) if w.is_cpu else cuda.quantize_experts(w, format)


def derive_columnwise_of_experts(
    rowwise: ExpertWeights, format: Float8Format, after: torch.Tensor
) -> ExpertWeights:
    """Columnwise codes of all experts: ``operands.derive_columnwise``.

    ``after`` keeps it in the backward pass, see ``derive_columnwise_in_backward``.
    """
    if torch.compiler.is_compiling():
        data, scale_inv, own = rowwise
        codes, scales = ops.derive_of_experts_as_one_node(data, scale_inv, after, own.name, format.name)
        return ExpertWeights(codes, scales, format)
    reference.refuse_freed(rowwise.data)
    if after.is_cpu:
        return operands.derive_columnwise(rowwise, format)
    return cuda.derive_columnwise_of_experts(rowwise, format)
