"""grouped_swiglu: a feed-forward layer of experts whose SwiGLU is computed where its result is cast.

Between two products of experts SwiGLU reads gate and up and writes its result, which is read again to be cast; backward
reads and writes twice as much. GatedMatmul casts what it computes from gate and up, so that neither the result nor the
gradients of gate and up are in memory in high precision. It saves what three calls of ``grouped_linear`` save.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from f8sub.errors import Float8ShapeError
from f8sub.experts.adapters import Adapted
from f8sub.experts.grouped_linear import (
    GroupedCall,
    Prepared,
    gradient_of_rows,
    gradient_of_weights,
    grouped_linear,
    is_watched,
    prepared,
    product_of_rows,
    tensors_of,
)
from f8sub.formats import ALL, Float8Format, present
from f8sub.kernels.grouped.gated import BOTH, EACH, GATE, UP, Gated
from f8sub.kernels.grouped.gemm import is_one_by_one
from f8sub.kernels.grouped.operands import Groups, Tokens, unstacked
from f8sub.kernels.quantize import quantize, quantize_gated
from f8sub.linear import autocast
from f8sub.linear.shared_input import cast_or_share
from f8sub.recipe import Recipe
from f8sub.torch_compat import apply


class GatedCall(NamedTuple):
    """The calls of the products: of gate and up together, or of each, and of down."""

    inputs: tuple[GroupedCall, ...]
    down: GroupedCall


class GatedMatmul(torch.autograd.Function):
    """The nine grouped products of a gated feed-forward layer, six where gate and up are one weight."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: torch.Tensor,
        ends: torch.Tensor,
        calls: GatedCall,
        down: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        groups, first = Groups.of(ends, len(x)), calls.inputs[0]
        recipe = first.plan.recipe
        needs_down, needs_inputs = ctx.needs_input_grad[3], any(ctx.needs_input_grad[4:])
        # y (M, 2 N) of one weight, or (M, N) of each
        formats = present(recipe.fprop.a), recipe.wgrad.b if needs_inputs else None
        a, kept_x, _ = cast_or_share(x, x.to(first.dtype), formats, first.plan, first.sources, groups)
        results = [
            product_of_rows(present(a), w, groups, call) for w, call in zip(inputs, calls.inputs, strict=True)
        ]
        recipe, plan = calls.down.plan.recipe, calls.down.plan
        formats = present(recipe.fprop.a), recipe.wgrad.b if needs_down else None
        h, kept_h, _ = quantize_gated(Gated(*_halves(results)), *formats, groups, plan.multiple)
        y = product_of_rows(present(h), down, groups, calls.down)
        saved = [() if kept is None else tensors_of(kept) for kept in (kept_x, kept_h)]
        ctx.save_for_backward(ends, down, *inputs, *results, *saved[0], *saved[1])
        ctx.calls, ctx.rows, ctx.dtype, ctx.saved_of_x = calls, len(x), x.dtype, len(saved[0])
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: D102
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError("experts are differentiated once; create_graph=True asks for twice")
        ends, down, *rest = ctx.saved_tensors
        calls: GatedCall = ctx.calls
        count = len(calls.inputs)
        inputs, results, saved = rest[:count], rest[count : 2 * count], rest[2 * count :]
        saved_x, saved_h = saved[: ctx.saved_of_x], saved[ctx.saved_of_x :]
        groups = Groups.of(ends, ctx.rows)
        needs_dx, needs_down, needs_inputs = (
            ctx.needs_input_grad[0], ctx.needs_input_grad[3], ctx.needs_input_grad[4:],
        )  # fmt: skip
        # Above the first layer that trains dh may be needed by none.
        needs_dh = needs_dx or any(needs_inputs)
        dy = dy.contiguous()  # sum() hands over strides of 0
        formats = _formats_of_dy(calls.down, needs_dh, needs_down)
        a, left, _ = quantize(dy, *formats, groups=groups, multiple=calls.down.plan.multiple)
        dh = dx = ddown = None
        if needs_dh:
            dh = gradient_of_rows(present(a), down, groups, calls.down, dy)
        if needs_down:
            ddown = _as_stored(
                gradient_of_weights(present(left), saved_h, down, groups, calls.down), calls.down
            )
        needs = [(needs_dx, needs_dw) for needs_dw in needs_inputs]
        codes = [(None, None)] * count if dh is None else _codes(calls.inputs, results, dh, needs, groups)
        dinputs: list[torch.Tensor | None] = []
        for w, call, (a, left), needs_dw in zip(inputs, calls.inputs, codes, needs_inputs, strict=True):
            if needs_dx:
                if dx is not None and dx.dtype != ctx.dtype:
                    # autograd adds the gradients of one tensor in its dtype.
                    dx = dx.to(ctx.dtype) + gradient_of_rows(present(a), w, groups, call, present(dh)).to(
                        ctx.dtype
                    )
                else:
                    dx = gradient_of_rows(present(a), w, groups, call, present(dh), dx)
            dw = gradient_of_weights(present(left), saved_x, w, groups, call) if needs_dw else None
            dinputs.append(None if dw is None else _as_stored(dw, call))
        return dx, None, None, ddown, *dinputs


def _codes(
    calls: tuple[GroupedCall, ...],
    results: list[torch.Tensor],
    dh: torch.Tensor,
    needs: list[tuple[bool, bool]],
    groups: Groups,
) -> list[tuple[Tokens | None, Tokens | None]]:
    """Return the operands of the gradients of the products' results, for dx and for dw of each."""
    formats = [_formats_of_dy(call, *needed) for call, needed in zip(calls, needs, strict=True)]
    gated = Gated(*_halves(results), dh)
    multiple = calls[0].plan.multiple
    if len(calls) == 1:
        a, left, _ = quantize_gated(gated._replace(side=BOTH), *formats[0], groups, multiple)
        return [(a, left)]
    # With scales of groups both are cast by one launch.
    if formats[0] == formats[1] and all(format is None or format.tile.cols == ALL for format in formats[0]):
        a, left, _ = quantize_gated(gated._replace(side=EACH), *formats[0], groups, multiple)
        return list(zip(_unstacked(a), _unstacked(left), strict=True))
    made = [
        quantize_gated(gated._replace(side=side), *own, groups, multiple)
        for side, own in zip((GATE, UP), formats, strict=True)
    ]
    return [(a, left) for a, left, _ in made]


def _unstacked(both: Tokens | None) -> tuple[Tokens | None, Tokens | None]:
    return (None, None) if both is None else unstacked(both)


def _halves(results: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = results if len(results) > 1 else results[0].chunk(2, 1)
    return gate, up


def _formats_of_dy(
    call: GroupedCall, needs_dx: bool, needs_dw: bool
) -> tuple[Float8Format | None, Float8Format | None]:
    recipe = call.plan.recipe
    return recipe.dgrad.a if needs_dx else None, recipe.wgrad.a if needs_dw else None


def _as_stored(dw: torch.Tensor, call: GroupedCall) -> torch.Tensor:
    return dw.transpose(1, 2) if call.transposed else dw


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``."""
    return F.silu(gate) * up


def grouped_swiglu(  # noqa: PLR0913  (what grouped_linear takes, of three weights)
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: torch.Tensor,
    offs: torch.Tensor,
    recipe: Recipe | str | None = None,
    *,
    transposed: bool = False,
    backend: str = "auto",
    act: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = swiglu,
) -> torch.Tensor:
    """``down(silu(gate(x)) * up(x))`` for each expert's weights and its tokens, in float8 by a recipe.

    It computes what ``grouped_linear`` of each weight does, with PyTorch's SwiGLU between them. On GPUs since Hopper
    SwiGLU is computed where its result is cast, forward and backward, in bfloat16 and where 128 divides N. With delayed
    scaling, adapters, and recipes of which a product is in high precision it is computed by itself.

    Args:
        x: (M, K), sorted by expert.
        gate: (E, N, K), or (E, 2 N, K), gate's rows before up's, where ``up`` is None.
        up: (E, N, K).
        down: (E, K, N).
        offs: as of ``grouped_linear``.
        recipe: as of ``grouped_linear``.
        transposed: whether weights are stored with their last two dimensions swapped.
        backend: see ``Plan.make``; with a recipe only.
        act: SwiGLU, for calls in which it is computed by itself: a compiled function, for one.

    Returns:
        (M, K), in x's dtype or that of ``torch.autocast``.

    Raises:
        Float8ShapeError: shapes that do not fit, an odd number of rows of gate and up together among them.
        Float8ConfigError: as of ``grouped_linear``.
    """
    inputs = [gate] if up is None else [gate, up]
    how: dict[str, Any] = {"transposed": transposed, "backend": backend}
    width = gate.shape[2 if transposed else 1] if gate.dim() == 3 else 0
    if up is None and width % 2:
        raise Float8ShapeError(
            f"grouped_swiglu takes one weight of gate and up together, (E, 2 N, K), got {tuple(gate.shape)}; hand gate "
            "and up over as two weights, or pad them"
        )
    found = None if is_watched() else _calls(x, inputs, down, offs, recipe, how)
    if found is None:
        results = [grouped_linear(x, w, offs, recipe, **how) for w in inputs]
        return grouped_linear(act(*_halves(results)), down, offs, recipe, **how)
    made, calls = found
    weights = [each.weight for each in made]
    y: torch.Tensor = apply(GatedMatmul, x, made[0].groups.ends, calls, weights[-1], *weights[:-1])
    if autocast.was_entered and made[-1].module is not None:
        autocast.remember(made[-1].module, calls.down.plan, y)
    return y


def _calls(
    x: torch.Tensor,
    inputs: list[torch.Tensor],
    down: torch.Tensor,
    offs: torch.Tensor,
    recipe: Recipe | str | None,
    how: dict[str, Any],
) -> tuple[list[Prepared], GatedCall] | None:
    """Return what is prepared, down last, and its calls; None where SwiGLU is computed by itself."""
    if any(isinstance(w, Adapted) for w in (*inputs, down)):
        return None
    made: list[Prepared] = []
    for w in inputs:
        made.append(prepared(x, w, offs, recipe, **how))
        if not _is_gated(made[-1].call):
            return None
    call = present(made[0].call)
    width = inputs[0].shape[2 if how["transposed"] else 1] * len(inputs) // 2
    # Of the result of SwiGLU, which is not in memory, the shape alone is looked at.
    h = x.new_empty(1, dtype=call.dtype).expand(len(x), width)
    made.append(prepared(h, down, offs, recipe, **how))
    if not _is_gated(made[-1].call):
        return None
    calls = [present(each.call) for each in made]
    return made, GatedCall(tuple(calls[:-1]), calls[-1])


def _is_gated(call: GroupedCall | None) -> bool:
    """Return whether every product of a call reads codes, with scales of current amaxes."""
    if call is None or call.plan.recipe.scaling is not None or is_one_by_one(call.plan.recipe):
        return False
    return not any(None in call.plan.recipe.formats(operand) for operand in ("x", "w", "dy"))
