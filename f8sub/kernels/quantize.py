"""High precision to codes, by the fastest kernel that takes a matrix; all of them agree to the bit."""

import torch

from f8sub.formats import Float8Format
from f8sub.kernels import ops, quantize_cpu, reference
from f8sub.kernels.reference import Quantized
from f8sub.kernels.scales import CURRENT, ScaleSource
from f8sub.kernels.triton import quantize_cuda


def quantize(
    x: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    source: ScaleSource = CURRENT,
    any_layout: bool = False,
) -> Quantized:
    """``reference.quantize`` with the scales of ``source``.

    Compiled code is always row-major: Inductor's lowering of ``_scaled_mm`` takes nothing else. Where the GEMMs take
    nothing else either (``any_layout``) it calls our kernels for what is copied transposed.
    """
    prior, reduce = source.prior(), source.reduce
    if torch.compiler.is_compiling():
        is_copied = columnwise is not None and not any_layout
        if reduce is None and (is_copied or (prior is None and not _are_fusible(rowwise, columnwise))):
            return ops.quantize(x, rowwise, columnwise, prior)
        return reference.quantize(x, rowwise, columnwise, False, prior, reduce)
    if reduce is not None:
        return reference.quantize(x, rowwise, columnwise, any_layout, prior, reduce)
    if type(x) is torch.Tensor and x.is_cpu:
        return quantize_cpu.quantize(x, rowwise, columnwise, any_layout, prior)
    return quantize_cuda.quantize(x, rowwise, columnwise, any_layout, prior)


def _are_fusible(*formats: Float8Format | None) -> bool:
    return all(ops.is_fusible(format) for format in formats if format is not None)
