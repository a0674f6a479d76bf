"""High precision to codes, by the fastest kernel that takes a matrix; all of them agree to the bit."""

import torch

from f8sub.formats import Float8Format
from f8sub.kernels import cuda, ops, reference
from f8sub.kernels.cpu import quantize_on_cpu
from f8sub.kernels.reference import Quantized
from f8sub.kernels.scales import CURRENT, ScaleSource


def quantize(
    x: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    source: ScaleSource = CURRENT,
    any_layout: bool = False,
) -> Quantized:
    """``reference.quantize`` with the scales of ``source``.

    Compiled code is always row-major: Inductor's lowering of ``_scaled_mm`` takes nothing else. Where the GEMMs take
    nothing else either, not ``any_layout``, it calls our kernels for what is copied transposed.
    """
    prior, reduce = source.prior(), source.reduce
    if torch.compiler.is_compiling():
        is_copied = columnwise is not None and not any_layout
        formats = [format for format in (rowwise, columnwise) if format is not None]
        is_fusible = prior is not None or all(map(ops.is_fusible, formats))
        if reduce is None and (is_copied or not is_fusible):
            return ops.quantized(x, rowwise, columnwise, prior)
        return ops.with_copied_columns(reference.quantize(x, rowwise, columnwise, True, prior, reduce))
    if reduce is not None:
        return reference.quantize(x, rowwise, columnwise, any_layout, prior, reduce)
    if type(x) is torch.Tensor and x.is_cpu:
        return quantize_on_cpu(x, rowwise, columnwise, any_layout, prior)
    return cuda.quantize(x, rowwise, columnwise, any_layout, prior)
