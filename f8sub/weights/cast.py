"""The rowwise operand of a weight that is not gathered as float8: cast once, and kept until the weight changes."""

import contextlib

import torch

from f8sub.formats import Float8Format, Operand, present
from f8sub.kernels.quantize import quantize
from f8sub.kernels.scales import CURRENT, LayerSource, ScaleSource
from f8sub.torch_compat import is_capturing
from f8sub.weights.master_weight import MasterWeight


def rowwise_of(
    weight: MasterWeight,
    format: Float8Format,
    dtype: torch.dtype,
    source: LayerSource = CURRENT,
    through: torch.dtype | None = None,
) -> Operand:
    """A master weight's rowwise operand, cast once and kept until the weight changes.

    A function, not a method: torch.compile takes a method of a tensor for an operator.

    Args:
        weight: (N, K), not sharded.
        format: of the codes.
        dtype: the weight is rounded to it first, as FSDP2's ``param_dtype`` or autocast would.
        source: of the scale.
        through: rounded to before ``dtype``: the weight's dtype in the model, where that is another.
    """
    if torch.compiler.is_compiling():
        return quantize_rowwise((weight if through is None else weight.to(through)).to(dtype), format, source)
    cell = weight.cell
    # A CUDA graph that recorded no cast would read these codes after every later step; and so would eager code
    # beside a graph that recorded the step.
    owned = weight.owns_storage and not (cell.replayed or is_capturing(weight))
    # Views share the cell: a transposed weight, or some of its rows, has other codes.
    place = weight.shape, weight.stride(), weight.storage_offset()
    key = weight.state, place, format, dtype, source.generation
    if owned and cell.cast is not None and cell.cast[0] == key:
        return cell.cast[1]
    # The cast outlives this forward, and a later backward cannot save inference tensors.
    inference = torch.is_inference_mode_enabled()
    with torch.inference_mode(mode=False) if inference else contextlib.nullcontext():
        values = weight.plain if through is None else weight.plain.to(through)
        operand = quantize_rowwise(values if values.dtype is dtype else values.to(dtype), format, source)
    # Under FakeTensorMode the codes of a real weight are fake, and must not outlive the mode.
    cell.cast = (key, operand) if owned and type(operand.data) is torch.Tensor else None
    return operand


def last_cast(weight: MasterWeight, format: Float8Format | None, dtype: torch.dtype) -> Operand | None:
    """What ``rowwise_of`` keeps, if that is of this format and dtype; None in compiled code."""
    if torch.compiler.is_compiling() or weight.cell.cast is None:
        return None
    (*_, kept_format, kept_dtype, _), operand = weight.cell.cast
    return operand if kept_format is format and kept_dtype is dtype else None


def quantize_rowwise(weight: torch.Tensor, format: Float8Format, source: ScaleSource = CURRENT) -> Operand:
    """A high-precision weight's rowwise operand; see ``rowwise_of``."""
    return present(quantize(weight, format, None, source).rowwise)
