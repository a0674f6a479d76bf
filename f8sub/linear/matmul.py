"""The three GEMMs of a linear layer over raw tensors, and what backward saves of them."""

from typing import Any

import torch

from f8sub.formats import Operand, present
from f8sub.kernels.ops import derive_columnwise_in_backward, small_part_of
from f8sub.kernels.quantize import quantize
from f8sub.linear.checkpointed_product import multiply
from f8sub.linear.saved_input import GemmInput, Kept, cast_x, x_columnwise
from f8sub.linear.shared_input import Call
from f8sub.recipe import GemmSpec
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.weights.cast import last_cast, quantize_rowwise, rowwise_of
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.weight import Weight


class Float8Matmul(torch.autograd.Function):
    """The three GEMMs over raw tensors."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        call: Call,
        keep_x: str,
        adds_bias: bool,
    ) -> torch.Tensor:
        wanted = keep_x if ctx.needs_input_grad[1] else None
        y, w_row, saved, ctx.kept = fprop(x, w, bias if adds_bias else None, call, wanted)
        of_w: tuple[torch.Tensor, ...] = ()
        if torch.compiler.is_compiling() and isinstance(w_row, Operand) and not isinstance(w, Float8Tensor):
            # For a partitioner to save or to make again: until torch 2.14 it knows a cast that backward repeats.
            of_w = w_row.tensors
        ctx.save_for_backward(w, *of_w, *saved)
        ctx.call, ctx.w_row, ctx.of_w = call, None, len(of_w)
        plan, dtype, sources = call
        if isinstance(w, MasterWeight) and not sources.distributed:
            ctx.w_row = last_cast(w, plan.recipe.fprop.b, dtype)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: D102
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "a float8 linear layer is differentiated once; create_graph=True asks for twice"
            )
        plan, dtype, sources = ctx.call
        recipe = plan.recipe
        need_dx, need_dw, need_dbias = ctx.needs_input_grad[:3]
        w, *saved = ctx.saved_tensors
        w_row = ctx.w_row
        if ctx.of_w:
            w_row, saved = Operand.of(present(recipe.fprop.b), *saved[: ctx.of_w]), saved[ctx.of_w :]
        matrix = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])
        rowwise, columnwise = recipe.dgrad.a if need_dx else None, recipe.wgrad.a if need_dw else None
        dy_row, dy_col, amax = quantize(matrix, rowwise, columnwise, sources.dy, plan.any_layout)
        if amax is not None:
            sources.dy.keep(amax)
        after = small_part_of(matrix, dy_row or dy_col if amax is None else None)
        dx = dw = dbias = None
        if need_dx:
            w_col = weight_columnwise(w, w_row, ctx.call, after)
            dx = gemm(plan.dgrad, recipe.dgrad, dy_row or matrix, w_col, dtype)
            dx = dx if dy.dim() == 2 else dx.reshape(*dy.shape[:-1], w.shape[1])
            del dy_row, w_col  # as large as what wgrad needs now; of an output projection a byte a logit
        if need_dw:
            x_col = x_columnwise(saved, ctx.kept, ctx.call, after)
            dw = gemm(plan.wgrad, recipe.wgrad, dy_col or matrix.t(), x_col, w.dtype)
        if need_dbias:
            dbias = matrix.sum(0, dtype=ctx.bias_dtype)
        return dx, dw, dbias, None, None, None


def fprop(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, call: Call, keep_x: str | None
) -> tuple[torch.Tensor, GemmInput, tuple[torch.Tensor, ...], Kept]:
    """``y`` with x's leading dims, what it read of w, and what ``cast_x`` saves of x."""
    plan, dtype, _ = call
    x_row, saved, kept = cast_x(x, call, keep_x)
    w_row = weight_rowwise(w, call)
    y = gemm(plan.fprop, plan.recipe.fprop, x_row, w_row, dtype)
    if bias is not None:
        y = y + bias.to(dtype)
    if x.dim() != 2 or torch.compiler.is_compiling():
        # Not a view to autograd: FSDP2 warns about modules that return views, and torch 2.11 compiles an
        # autograd.Function that returns one, or what .to() did not change, to one without gradients.
        y = torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], w.shape[0]))
    return y, w_row, saved, kept


def gemm(
    backend: str | None, spec: GemmSpec, a: GemmInput, b: GemmInput, out_dtype: torch.dtype
) -> torch.Tensor:
    """``a @ b.t()`` in ``out_dtype``: both in float8, by the backend of that name, or neither."""
    if isinstance(a, Operand) and isinstance(b, Operand) and backend is not None:
        return multiply(backend, a, b, out_dtype, spec.fast_accum)
    if isinstance(a, Operand) or isinstance(b, Operand):
        raise RuntimeError(f"one operand of {spec} is in float8 and the other is not")
    return torch.mm(a, b.t().to(a.dtype)).to(out_dtype)


def weight_rowwise(w: torch.Tensor, call: Call) -> GemmInput:
    """``w``'s rowwise operand: as gathered, as cast last, or cast now; w itself where fprop is in high precision.

    ``w``, (N, K), is unsharded by FSDP2 in float8, a master weight, or a plain tensor gathered in high precision. It is
    rounded to the call's dtype before it is cast.
    """
    plan, dtype, sources = call
    format = plan.recipe.fprop.b
    if isinstance(w, Float8Tensor):
        return w.dequantize().to(dtype) if format is None else _gathered(w)
    if format is None:
        return w.to(dtype)
    if isinstance(w, MasterWeight) and not sources.distributed:
        return rowwise_of(w, format, dtype, sources.w, None)
    if isinstance(w, Weight) and not isinstance(w, MasterWeight):
        return type(w).rowwise_codes(w, format, dtype, sources.w)
    return quantize_rowwise(_plain(w, dtype), format, sources.w)


def weight_columnwise(w: torch.Tensor, w_row: Operand | None, call: Call, after: torch.Tensor) -> GemmInput:
    """``w``'s columnwise operand, always derived from its rowwise codes so that every way of sharding agrees.

    ``w_row`` is the operand that forward read, where something keeps it alive anyway.
    """
    plan, dtype, sources = call
    columnwise = plan.recipe.dgrad.b
    if columnwise is None:
        return (w.dequantize() if isinstance(w, Float8Tensor) else w).to(dtype).t()
    if w_row is None and isinstance(w, Float8Tensor):
        w_row = _gathered(w)
    operand = weight_rowwise(w, call) if w_row is None else w_row
    if isinstance(operand, Operand):
        return derive_columnwise_in_backward(operand, columnwise, after, plan.any_layout)
    return present(quantize(_plain(operand, dtype), None, columnwise, sources.w).columnwise)


def _gathered(w: Float8Tensor) -> Operand:
    # Not w.rowwise: for all that compiled code reads of that, its guards would make the operand again.
    return Operand(w.rowwise_data, w.rowwise_scale_inv, present(w.rowwise_format), w.rowwise_global_scale_inv)


def _plain(w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight's values in ``dtype``; no MasterWeight in eager code."""
    values = w.plain if isinstance(w, MasterWeight) and not torch.compiler.is_compiling() else w
    return values.to(dtype)
