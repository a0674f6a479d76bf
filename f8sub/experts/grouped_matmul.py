"""GroupedMatmul: the three grouped products of one call, differentiated."""

from typing import Any, NamedTuple

import torch

from f8sub.errors import Float8ConfigError
from f8sub.formats import Float8Format
from f8sub.kernels import ops
from f8sub.kernels.grouped import ops as grouped_ops
from f8sub.kernels.grouped.gemm import GroupedPlan
from f8sub.kernels.grouped.operands import ExpertWeights, Groups, Tokens, flat_format, seen_transposed
from f8sub.kernels.grouped.quantize import (
    brought_to_rows,
    cast_tokens,
    cast_weights,
    derive_columnwise_of_experts,
    quantize_experts,
    rowwise_of_weights,
)
from f8sub.kernels.scales import CURRENT_SOURCES, Sources
from f8sub.linear.shared_input import cast_or_share_tokens
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.weights.master_weight import MasterWeight, rowwise_of
from f8sub.weights.weight import Weight


class Call(NamedTuple):
    """One call: the plan, the dtype that x and w are cast from, how the weight is stored, and whence scales come."""

    plan: GroupedPlan
    dtype: torch.dtype
    transposed: bool
    sources: Sources = CURRENT_SOURCES


class GroupedMatmul(torch.autograd.Function):
    """The three grouped products over raw tensors."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, call: Call
    ) -> torch.Tensor:
        plan, dtype, _, sources = call
        recipe, groups = plan.recipe, Groups.of(ends, len(x))
        spec, columnwise = recipe.fprop, recipe.wgrad.b if ctx.needs_input_grad[1] else None
        a, kept, _ = cast_or_share_tokens(x, dtype, groups, (spec.a, columnwise), plan.multiple, sources.x)
        x = x.to(dtype)
        if a is None or spec.b is None:
            y = grouped_ops.high_precision_rows(x, _values(w, call), groups)
        else:
            y = grouped_ops.rows(plan.fprop, spec, a, rowwise_of_experts(w, spec.b, call), groups, dtype)
        saved: tuple[torch.Tensor, ...] = ()
        if ctx.needs_input_grad[1]:
            saved = (x,) if kept is None else (kept.data, kept.scale_inv, kept.groups.first, kept.groups.ends)
        ctx.save_for_backward(w, ends, *saved)
        ctx.call, ctx.rows = call, len(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: D102
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError("experts are differentiated once; create_graph=True asks for twice")
        w, ends, *saved = ctx.saved_tensors
        call: Call = ctx.call
        plan, dtype, _, sources = call
        recipe, groups = plan.recipe, Groups.of(ends, ctx.rows)
        dy = dy.contiguous()  # sum() hands over strides of 0
        dx = dw = None
        d, g = recipe.dgrad, recipe.wgrad
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        formats = d.a if needs_dx else None, g.a if needs_dw else None
        a, left, amax = cast_tokens(dy, groups, *formats, plan.multiple, sources.dy.prior())
        if amax is not None:
            sources.dy.keep(amax)
        if needs_dx:
            if a is None or d.b is None:
                dx = grouped_ops.high_precision_rows(dy, _values(w, call).transpose(1, 2), groups)
            else:
                dx = grouped_ops.rows(plan.dgrad, d, a, _columnwise(w, d.b, call, dy), groups, dtype)
        if needs_dw:
            if left is None or g.b is None or plan.wgrad is None:
                dw = grouped_ops.high_precision_weights(dy, saved[0], groups).to(w.dtype)
            else:
                data, scale_inv, first, stops = saved
                right = Tokens(data, scale_inv, g.b, Groups(first, stops, data.shape[1]), True)
                dw = grouped_ops.weights(plan.wgrad, g, left, right, groups, w.dtype)
            dw = dw.transpose(1, 2) if call.transposed else dw
        return dx, dw, None, None


def _values(w: torch.Tensor, call: Call) -> torch.Tensor:
    """(E, N, K) in the call's dtype; what the codes stand for of a weight that is gathered in float8."""
    values = _as_stored(w, call.dtype)
    return values.transpose(1, 2) if call.transposed else values


def _as_stored(w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight's values in ``dtype``; no MasterWeight in eager code."""
    if isinstance(w, MasterWeight) and not torch.compiler.is_compiling():
        return w.plain.to(dtype)
    return (w.dequantize() if isinstance(w, Float8Tensor) else w).to(dtype)


def rowwise_of_experts(w: torch.Tensor, format: Float8Format, call: Call) -> ExpertWeights:
    """All experts' rowwise operand: as gathered, as cast last, or cast now. Rounded to the call's dtype before."""
    stored = seen_transposed(format) if call.transposed else format
    flat = flat_format(stored, w.shape[1])
    if isinstance(w, Float8Tensor):
        if w.rowwise is None:
            raise Float8ConfigError(f"{w!r} has no rowwise operand, which experts read")
        found = ExpertWeights.of(w.rowwise, tuple(w.shape), stored)
    elif isinstance(w, MasterWeight) and flat is not None and _keeps_codes(w):
        rows: Any = w.flatten(0, 1)
        made = rowwise_of(rows, flat, call.dtype, call.sources.w)
        found = ExpertWeights.of(made, tuple(w.shape), stored)
    elif isinstance(w, Weight) and not isinstance(w, MasterWeight) and flat is not None:
        found = ExpertWeights.of(type(w).rowwise_codes(w, flat, call.dtype), tuple(w.shape), stored)
    elif (prior := call.sources.w.prior()) is not None:
        found = cast_weights(_as_stored(w, call.dtype), stored, prior)
    else:
        return rowwise_of_weights(_as_stored(w, call.dtype), format, call.transposed)
    return brought_to_rows(found, format) if call.transposed else found


def _keeps_codes(w: MasterWeight) -> bool:
    """Whether codes of all experts' rows, one after the other, are kept until the weight changes."""
    return w.is_contiguous() and not torch.compiler.is_compiling()


def _columnwise(w: torch.Tensor, format: Float8Format, call: Call, dy: torch.Tensor) -> ExpertWeights:
    """All experts' columnwise operand, derived from the rowwise codes, as a linear layer's is; not before ``dy``."""
    rowwise = call.plan.recipe.fprop.b
    if rowwise is None:
        return quantize_experts(_values(w, call).transpose(1, 2), format)
    after = ops.small_part_of(dy, None)
    return derive_columnwise_of_experts(rowwise_of_experts(w, rowwise, call), format, after)
