"""Layer 4. ``down(silu(gate(x)) * up(x))`` as one function: h and its gradients go to memory in float8 alone.

x  --quantize--> gate and up's GEMMs      saved for backward: x's columnwise codes, gate and up
gate, up --SwiGLU--> h rowwise            saved for backward: nothing; columnwise is made again of gate and up
dy --quantize--> down's dgrad and wgrad
dh, gate, up --dSwiGLU--> dgate and dup rowwise, columnwise, h columnwise

The numbers are those of the three layers one after the other with torch's own silu and product, bitwise.
"""

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from f8sub import backends
from f8sub.backends import Plan
from f8sub.context import contexts, plan_in_use, remember
from f8sub.formats import HIGH_PRECISION, Operand
from f8sub.kernels import producer_ops, producers
from f8sub.kernels.delayed import PastScale
from f8sub.kernels.ops import small_part_of
from f8sub.kernels.producers import Activated, Gradients, Wanted
from f8sub.linear import Float8Linear, gemm, weight_columnwise, weight_rowwise
from f8sub.saved_input import GemmInput, Kept, as_matrix, present, quantize_x, x_columnwise
from f8sub.scaling_state import DY, Past, X, quantize_delayed
from f8sub.shared_input import is_like_no_other
from f8sub.tensor.master_weight import MasterWeight, last_cast
from f8sub.torch_compat import apply, autocast_dtype


class Roles(NamedTuple):
    """Names of a feed-forward's layers among its module's children."""

    gate: str
    up: str
    down: str


class FusedFeedForward(torch.nn.Module):
    """A feed-forward whose forward is one function; made by ``fuse_producers``, by class swap.

    The layers stay what and where they are. Where something is to be seen of each of them (hooks, a forward that is
    wrapped, DTensors, another recipe in use by ``f8sub.autocast``) they run one after the other, as before, with the
    same numbers.

    Attributes:
        roles: which of its children are gate, up and down.
    """

    roles: Roles

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        layers = [getattr(self, name) for name in self.roles]
        if _run_apart(layers, x):
            return super().forward(x)  # type: ignore[no-any-return]
        y = feed_forward(x, *layers)
        if contexts.entered:
            for layer in layers:
                remember(layer, layer.plan, y)
        return y

    def extra_repr(self) -> str:
        """What the module's own class says, and that it is fused."""
        return ", ".join(filter(None, (super().extra_repr(), "fused: silu(gate) * up -> float8")))


def _run_apart(layers: list[Float8Linear], x: torch.Tensor) -> bool:
    """Whether the layers run by themselves."""
    if x.dtype not in HIGH_PRECISION or x.dim() == 0:
        return True
    for layer in layers:
        # What took a layer's place, or wraps its forward, as torchtitan does where it changes how tensors are cut.
        if type(layer).forward is not Float8Linear.forward or "forward" in layer.__dict__:
            return True
        if (
            layer._forward_hooks
            or layer._forward_pre_hooks
            or layer._backward_hooks
            or layer._backward_pre_hooks
        ):
            return True
        if isinstance(layer.weight, DTensor):
            return True
    if isinstance(x, DTensor) or x.size(-1) != layers[0].weight.size(-1):
        return True
    return contexts.entered and any(plan_in_use(layer) is not layer.plan for layer in layers)


class Call(NamedTuple):
    """How one of the layers runs in a call; see ``Float8Linear``."""

    plan: Plan
    scaling: Past | None
    keep_x: str


def feed_forward(x: torch.Tensor, gate: Float8Linear, up: Float8Linear, down: Float8Linear) -> torch.Tensor:
    """``down(silu(gate(x)) * up(x))``.

    Args:
        x: (..., in_features of gate); float32, bfloat16 or float16.
        gate: a layer with whole weights, as the others: none is a DTensor.
        up: likewise, with gate's recipe.
        down: likewise.
    """
    device = "cpu" if x.is_cpu else x.device.type
    dtype = autocast_dtype(device) or x.dtype
    calls = []
    for layer in (gate, up, down):
        if layer.plan.device.type != device:
            layer.follow(x.device)
        past = None if layer.plan.recipe.delayed is None else layer.past(layer.plan.recipe)
        calls.append(Call(layer.plan, past, layer.keep_x))
    weights = gate.weight, up.weight, down.weight
    biases = gate.bias, up.bias, down.bias
    if torch.is_grad_enabled():
        y: torch.Tensor = apply(_FeedForward, x, *weights, *biases, *calls, dtype)
        return y
    return _forward(x, weights, biases, tuple(calls), dtype, keep=False)[0]


Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Biases = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
Calls = tuple[Call, ...]


class _Saved(NamedTuple):
    """What forward leaves for backward, tensors and all."""

    gate: torch.Tensor
    up: torch.Tensor
    scale: torch.Tensor | None
    x: tuple[tuple[torch.Tensor, ...], Kept]
    x_of_up: tuple[tuple[torch.Tensor, ...], Kept]


def _forward(
    x: torch.Tensor, weights: Weights, biases: Biases, calls: Calls, dtype: torch.dtype, *, keep: bool
) -> tuple[torch.Tensor, _Saved]:
    gate_call, up_call, down_call = calls
    matrix = as_matrix(x, dtype)
    x_row, saved, kept = quantize_x(
        x, matrix, gate_call.plan, gate_call.scaling, gate_call.keep_x if keep else None
    )
    up_row, of_x = x_row, (saved, kept)
    of_up = of_x
    if up_call.scaling is not None or up_call.keep_x != gate_call.keep_x:
        up_row, saved, kept = quantize_x(
            x, matrix, up_call.plan, up_call.scaling, up_call.keep_x if keep else None
        )
        of_up = (saved, kept)
    gate = _product(x_row, weights[0], biases[0], gate_call, dtype)
    up = _product(up_row, weights[1], biases[1], up_call, dtype)
    h = _activate(gate, up, down_call)
    y = _product(h.row, weights[2], biases[2], down_call, dtype)
    if x.dim() != 2 or torch.compiler.is_compiling():
        y = torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], weights[2].shape[0]))  # as of Float8Linear
    return y, _Saved(gate, up, h.scale, of_x, of_up)


def _product(
    x: GemmInput, w: torch.Tensor, bias: torch.Tensor | None, call: Call, dtype: torch.dtype
) -> torch.Tensor:
    recipe = call.plan.recipe
    y = gemm(call.plan.fprop, recipe.fprop, x, weight_rowwise(w, recipe.fprop.b, dtype, call.scaling), dtype)
    return y if bias is None else y + bias.to(dtype)


def _activate(gate: torch.Tensor, up: torch.Tensor, down: Call) -> Activated:
    format, past = present(down.plan.recipe.fprop.a), down.scaling
    quantize = producer_ops.quantize_swiglu if torch.compiler.is_compiling() else producers.quantize_swiglu
    made = quantize(gate, up, format, None if past is None else past.scale(X))
    if past is not None and past.stage and made.largest is not None:
        past.state.stage(X, made.largest)
        is_like_no_other(past.state)
    return made


class _FeedForward(torch.autograd.Function):
    """The nine GEMMs over raw tensors."""

    @staticmethod
    def forward(  # noqa: PLR0913  (an autograd.Function takes no keywords)
        ctx: Any,
        x: torch.Tensor,
        gate_w: torch.Tensor,
        up_w: torch.Tensor,
        down_w: torch.Tensor,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        gate: Call,
        up: Call,
        down: Call,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        weights, biases, calls = (gate_w, up_w, down_w), (gate_bias, up_bias, down_bias), (gate, up, down)
        keep = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        y, saved = _forward(x, weights, biases, calls, dtype, keep=keep)
        of_x, ctx.kept = saved.x
        of_up, ctx.kept_by_up = saved.x_of_up
        ctx.counts = len(of_x), len(of_up), saved.scale is not None
        scale = () if saved.scale is None else (saved.scale,)
        ctx.save_for_backward(*weights, saved.gate, saved.up, *of_x, *of_up, *scale)
        ctx.calls, ctx.dtype, ctx.x_dtype, ctx.x_shape = calls, dtype, x.dtype, x.shape
        ctx.w_rows = [
            last_cast(w, call.plan.recipe.fprop.b, dtype) if isinstance(w, MasterWeight) else None
            for w, call in zip(weights, calls, strict=True)
        ]
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "a float8 feed-forward is differentiated once; create_graph=True asks for twice"
            )
        needs, dtype, calls = ctx.needs_input_grad, ctx.dtype, ctx.calls
        gate_w, up_w, down_w, gate, up, *rest = ctx.saved_tensors
        weights = (gate_w, up_w, down_w)
        count, count_up, has_scale = ctx.counts
        of_x, of_up = rest[:count], rest[count : count + count_up]
        scale = rest[-1] if has_scale else None
        matrix = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])
        gradients: list[torch.Tensor | None] = [None] * 7

        def dgrad(index: int, row: Operand, after: torch.Tensor) -> torch.Tensor:
            plan, scaling = calls[index].plan, calls[index].scaling
            w_col = weight_columnwise(weights[index], ctx.w_rows[index], plan, dtype, after, scaling)
            return gemm(plan.dgrad, plan.recipe.dgrad, row, w_col, dtype)

        def wgrad(index: int, col: Operand, x_col: GemmInput) -> torch.Tensor:
            plan = calls[index].plan
            return gemm(plan.wgrad, plan.recipe.wgrad, col, x_col, weights[index].dtype)

        below = needs[0] or needs[1] or needs[2] or needs[4] or needs[5]
        dy_row, dy_col = _quantize_dy(calls[2], matrix, below, needs[3])
        after = small_part_of(matrix, None if calls[2].scaling is not None else dy_row or dy_col)
        if needs[6]:
            gradients[6] = matrix.sum(0, dtype=ctx.bias_dtypes[2])
        dh = dgrad(2, present(dy_row), after) if below else None
        made = _differentiate(dh, gate, up, calls, needs, scale)
        if needs[3]:
            gradients[3] = wgrad(2, present(dy_col), present(made.h_col))
        if dh is not None and (needs[4] or needs[5]):
            sums = producers.swiglu_backward(dh, gate, up)
            for index, gradient in zip((4, 5), sums, strict=True):
                if needs[index]:
                    gradients[index] = gradient.sum(0, dtype=ctx.bias_dtypes[index - 4])
        if needs[0]:
            known = made.dgate.row if calls[0].scaling is None else None
            after = small_part_of(gate if dh is None else dh, known)
            dx = dgrad(1, present(made.dup.row), after).to(ctx.x_dtype)
            dx = dx + dgrad(0, present(made.dgate.row), after).to(ctx.x_dtype)
            gradients[0] = dx.reshape(ctx.x_shape)
        if needs[1]:
            x_col = x_columnwise(of_x, ctx.kept, calls[0].plan, dtype, after, calls[0].scaling)
            gradients[1] = wgrad(0, present(made.dgate.col), x_col)
        if needs[2]:
            x_col = x_columnwise(of_up, ctx.kept_by_up, calls[1].plan, dtype, after, calls[1].scaling)
            gradients[2] = wgrad(1, present(made.dup.col), x_col)
        return *gradients, None, None, None, None


def _quantize_dy(
    down: Call, matrix: torch.Tensor, rowwise: bool, columnwise: bool
) -> tuple[Operand | None, Operand | None]:
    plan = down.plan
    formats = plan.recipe.dgrad.a if rowwise else None, plan.recipe.wgrad.a if columnwise else None
    if down.scaling is None:
        return backends.quantize(matrix, *formats, plan.any_layout)
    return quantize_delayed(down.scaling, DY, matrix, formats, plan.any_layout)


def _differentiate(
    dh: torch.Tensor | None,
    gate: torch.Tensor,
    up: torch.Tensor,
    calls: Calls,
    needs: tuple[bool, ...],
    scale: torch.Tensor | None,
) -> Gradients:
    """The gradients of gate and up as they are read, and h by columns where down's weight learns."""
    gate_call, up_call, down_call = calls
    recipe = gate_call.plan.recipe
    usages = recipe.dgrad.a if needs[0] else None, recipe.wgrad.a if needs[1] or needs[2] else None
    h_format = down_call.plan.recipe.wgrad.b if needs[3] else None
    pasts: tuple[PastScale, PastScale] | None = None
    if gate_call.scaling is not None and up_call.scaling is not None:
        pasts = gate_call.scaling.scale(DY), up_call.scaling.scale(DY)
    wanted = Wanted(usages, usages, h_format, pasts)
    if dh is None or usages == (None, None):
        dh, wanted = gate, Wanted((None, None), (None, None), h_format)
    if torch.compiler.is_compiling():
        made = producer_ops.quantize_swiglu_backward(dh, gate, up, wanted, scale)
    else:
        any_layout = gate_call.plan.any_layout and down_call.plan.any_layout
        made = producers.quantize_swiglu_backward(dh, gate, up, wanted, scale, any_layout)
    for call, cast in ((up_call, made.dup), (gate_call, made.dgate)):
        if call.scaling is not None and call.scaling.stage and cast.largest is not None:
            call.scaling.state.stage(DY, cast.largest)
    return made
