"""Float8Linear: ``y = x @ w.t() + bias`` with each of the three GEMMs run as the recipe says.

[Note: from x, w and dy to y, dx and dw]

x  --quantize--> rowwise, columnwise       saved for backward: columnwise only, 1 byte an element; see saved_input
w  --quantize--> rowwise                   saved for backward: nothing; columnwise is derived there and freed
dy --quantize--> rowwise, columnwise

- A plan (``kernels/gemm/select.py``) is the recipe and the backend of each GEMM.
- Sources (``kernels/scales.py``) say how the scales of x, w and dy are made in one call: from the current amax, or from
  what a feature made before. Forward makes them, and backward uses them too.
- ``kernels/quantize.py`` picks the kernel that casts. ``saved_input.py`` decides what backward has of x.
- ``autocast.py`` gives other plans for a while, ``dtensor.py`` what DTensors need, ``shared_input.py`` the codes of an
  x that another layer cast.

Compiled forwards are one node to dynamo, which does not look inside: it would guard on all that the plan and these
modules hold, at each call, and cannot look into DTensors of float8. The node knows its plan by the plan's key.
AOTAutograd runs the node while it traces, with tensors that show what is in them, and so compiles what is in the node.
Dynamo does look into layers with delayed scaling, and into those whose weight is a DTensor in high precision.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from f8sub.delayed.state import delayed_sources_of
from f8sub.errors import Float8ConfigError, Float8ShapeError
from f8sub.formats import HIGH_PRECISION, Float8Format, Operand, present
from f8sub.kernels.gemm.select import Plan, gemm_nt
from f8sub.kernels.graph_ops import enter_graph_functions, in_graph
from f8sub.kernels.quantize import derive_columnwise_in_backward, quantize, small_part_of
from f8sub.kernels.scales import CURRENT_SOURCES, Sources
from f8sub.linear import autocast
from f8sub.linear.checkpointing import as_mm, mm_in_graph
from f8sub.linear.converted import ConvertedModule, LayerState
from f8sub.linear.dtensor import Places, place
from f8sub.linear.saved_input import GemmInput, Kept, cast_x, x_columnwise
from f8sub.linear.shared_input import Call
from f8sub.recipe import GemmSpec, Recipe
from f8sub.tensor.float8_tensor import Float8Tensor, UnroundedGradient
from f8sub.torch_compat import (
    apply,
    autocast_dtype,
    compiling,
    constant_result,
    dispatch_stack_size,
    is_dtensor,
    traced,
    untraced,
)
from f8sub.weights.master_weight import MasterWeight, last_cast, quantize_rowwise, rowwise_of
from f8sub.weights.weight import RAW, Weight, local_tensor, written_raw

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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
        # Saving a gathered w keeps no memory: where FSDP2 reshards after forward it frees the storage, and fills it
        # again before backward.
        ctx.save_for_backward(w, *of_w, *saved)
        ctx.call, ctx.w_row, ctx.of_w = call, None, len(of_w)
        plan, dtype, sources = call
        if isinstance(w, MasterWeight) and not sources.distributed:
            ctx.w_row = last_cast(w, plan.recipe.fprop.b, dtype)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.dtype_of_dw = w.wgrad_dtype if isinstance(w, Float8Tensor) else w.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: D102
        # Autograd runs backward with gradients enabled for ``create_graph=True`` alone.
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
            # dx (M, K) = dy (M, N) @ w (N, K)
            w_col = weight_columnwise(w, w_row, ctx.call, after)
            dx = gemm(plan.dgrad, recipe.dgrad, dy_row or matrix, w_col, dtype)
            dx = dx if dy.dim() == 2 else dx.reshape(*dy.shape[:-1], w.shape[1])
            del dy_row, w_col  # as large as what wgrad needs now; of an output projection a byte a logit
        if need_dw:
            # dw (N, K) = dy.t() (N, M) @ x (M, K)
            x_col = x_columnwise(saved, ctx.kept, ctx.call, after)
            made_as = w.dtype if dy_col is None else ctx.dtype_of_dw
            dw = gemm(plan.wgrad, recipe.wgrad, dy_col or matrix.t(), x_col, made_as)
            dw = dw if made_as == w.dtype else UnroundedGradient(dw, w.dtype)
        if need_dbias:
            # Of dy as it came: a sum over codes would add up what each of them was rounded by.
            dbias = matrix.sum(0, dtype=ctx.bias_dtype)
        return dx, dw, dbias, None, None, None


def fprop(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, call: Call, keep_x: str | None
) -> tuple[torch.Tensor, GemmInput, tuple[torch.Tensor, ...], Kept]:
    """``y`` with x's leading dims, what it read of w, and what ``cast_x`` saves of x."""
    plan, dtype, _ = call
    x_row, saved, kept = cast_x(x, call, keep_x)
    w_row = weight_rowwise(w, call)
    # y (M, N) = x (M, K) @ w.t() (K, N)
    if bias is None or isinstance(x_row, Operand) or isinstance(w_row, Operand):
        y = gemm(plan.fprop, plan.recipe.fprop, x_row, w_row, dtype)
        y = y if bias is None else y + bias.to(dtype)
    else:
        # In high precision y is nn.Linear's to the bit, which rounds the sum once.
        y = torch.addmm(bias.to(x_row.dtype), x_row, w_row.t().to(x_row.dtype)).to(dtype)
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
        if torch.compiler.is_dynamo_compiling():
            return mm_in_graph(backend, a, b, out_dtype, spec.fast_accum)
        # A checkpointing policy, a FLOP counter or an export looks on.
        if dispatch_stack_size() > 0:
            return as_mm(backend, a, b, out_dtype, spec.fast_accum)
        return gemm_nt(backend, a, b, out_dtype, spec.fast_accum)
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


def sources_of(layer: torch.nn.Module, recipe: Recipe, name: str = "weight") -> Sources:
    """The sources of a forward that begins now, of the product with the weight of that name."""
    return CURRENT_SOURCES if recipe.scaling is None else delayed_sources_of(layer, recipe, name)


_TracedMatmul = traced(Float8Matmul)


class Unnamed:
    """A stand-in for the layer in a node, which serves all layers of a kind and has no layer's name."""

    fqn = "a layer in compiled code"


@constant_result
def _takes(x: torch.dtype, weight: torch.dtype) -> bool:
    """Return whether a layer takes an x and a weight of these dtypes."""
    return x in HIGH_PRECISION and weight not in RAW


def _untaken(fqn: str, x: torch.Tensor, weight: torch.Tensor) -> Exception:
    """Return the error where ``_takes`` says no."""
    if weight.dtype in RAW:
        return written_raw(fqn, weight.dtype)  # past every operator, as by ``weight.data = codes``
    return TypeError(
        f"{fqn}: a float8 linear layer takes an input of {', '.join(map(str, HIGH_PRECISION))}, got "
        f"{x.dtype} of shape {tuple(x.shape)}; convert it with .to(torch.bfloat16)"
    )


@constant_result
def _is_one_node(key: str, device: str) -> bool:
    """Return whether a forward by that plan, of an x on that type of device, needs nothing that the layer keeps."""
    plan = Plan.made[key]
    return plan.recipe.scaling is None and plan.device.type == device


@in_graph
def _node_of_tensors(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    key: str,
    dtype: torch.dtype,
    keep_x: str,
) -> torch.Tensor:
    """Do what ``Float8Linear.forward`` does with a weight that is no DTensor, by the plan of that key."""
    # A key, because dynamo of 2.11 cannot hand over the plan itself.
    call = Plan.made[key], dtype, CURRENT_SOURCES
    with compiling():
        # Without gradients nothing is saved, and an autograd function would ask for it.
        if not torch.is_grad_enabled():
            return fprop(x, weight, bias, call, None)[0]
        y: torch.Tensor = _TracedMatmul.apply(x, weight, bias, call, keep_x, True)
        return y


@in_graph
def _node(
    x: torch.Tensor, weight: "DTensor", bias: torch.Tensor | None, key: str, dtype: torch.dtype, keep_x: str
) -> torch.Tensor:
    """Do what ``Float8Linear.forward`` does with a weight that is a DTensor, by the plan of that key."""
    plan = Plan.made[key]
    with compiling():
        places = Places.of(Unnamed, weight, x)
        sources = places.sources(Unnamed, plan, weight, x, CURRENT_SOURCES)
        of_rank = places.local(x, weight, bias)
        y: torch.Tensor = _TracedMatmul.apply(*of_rank, (plan, dtype, sources), keep_x, places.adds_bias)
        return places.whole(y)


@untraced
def _eagerly(layer: "Float8Linear", x: torch.Tensor) -> torch.Tensor:
    return layer.forward(x)


def one_node(
    layer: "Float8Linear",
    plan: Plan,
    dtype: torch.dtype,
    x: torch.Tensor,
    weight: "DTensor",
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The layer's forward, in the graph; eagerly between two graphs where scales are made of what the layer keeps."""
    if plan.recipe.scaling is not None:
        return _eagerly(layer, x)
    enter_graph_functions()
    return _node(x, weight, bias, plan.key, dtype, layer._f8sub.keep_x)


class Float8Linear(ConvertedModule, torch.nn.Linear):
    """``nn.Linear`` whose three GEMMs run in float8; ``convert_to_float8`` creates it, by class swap.

    x is float32, bfloat16 or float16, with any leading dims, and need not have the weight's dtype. y has x's dtype, or
    that of ``torch.autocast``. The bias is added in high precision.

    Its only attribute other than those of nn.Linear is ``_f8sub``, which has the layer's ``plan``, with its ``recipe``,
    ``fqn``, ``float8_all_gather`` and ``keep_x``; users' classes and code may take any other name.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise Float8ConfigError(
            f"{type(self).__name__} is created by f8sub.convert_to_float8, from an nn.Linear in a model; build the "
            "model with nn.Linear and convert it, or one layer: "
            "f8sub.convert_to_float8(nn.Linear(in_features, out_features))"
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: D102
        x = input  # nn.Linear's name, which callers and sharding plans know it by
        state = self._f8sub
        weight: torch.Tensor = self.weight
        if not _takes(x.dtype, weight.dtype):
            raise _untaken(state.fqn, x, weight)
        # Not in_features: a rank may have a part of the weight, as a plain tensor, which reads a part of x.
        if x.dim() == 0 or x.size(-1) != weight.size(-1):
            raise Float8ShapeError(
                f"{state.fqn}: expected an input of shape (..., {weight.size(-1)}), got {tuple(x.shape)}; look at what "
                "calls the layer"
            )
        device = "cpu" if x.is_cpu else x.device.type
        dtype = autocast_dtype(device) or x.dtype
        bias: torch.Tensor | None = self.bias
        if torch.compiler.is_compiling() and not is_dtensor(weight):
            # The key is all that is read of the plan, and so all of it that is guarded on.
            key = autocast.key_in_use(self, weight)
            if _is_one_node(key, device):
                enter_graph_functions()
                return _node_of_tensors(x, weight, bias, key, dtype, state.keep_x)
        if state.plan.device.type != device:
            state.follow(x.device)
        plan = autocast.plan_in_use(self, weight) if autocast.was_entered else state.plan
        sources = CURRENT_SOURCES if plan.recipe.scaling is None else delayed_sources_of(self, plan.recipe)
        adds_bias = True
        whole: Callable[[torch.Tensor], torch.Tensor] | None = None
        if is_dtensor(weight):
            if torch.compiler.is_compiling() and Float8Tensor in map(type, map(local_tensor, (x, weight))):
                return one_node(self, plan, dtype, x, weight, bias)
            placed = place(self, plan, weight, x, bias, sources)
            x, weight, bias, adds_bias, sources, whole = placed
        y: torch.Tensor
        call = plan, dtype, sources
        if torch.is_grad_enabled():
            y = apply(Float8Matmul, x, weight, bias, call, state.keep_x, adds_bias)
        else:
            y, *_ = fprop(x, weight, bias if adds_bias else None, call, None)
        if autocast.was_entered:
            autocast.remember(self, plan, y)
        return y if whole is None else whole(y)


class LinearState(LayerState):
    """Holds what f8sub knows of a linear layer."""

    __slots__ = ()

    @override
    def format_of(self, module: torch.nn.Module, name: str) -> Float8Format | None:
        """The format that one of the GEMMs reads the weight in, fprop's before the others'."""
        recipe = self.plan.recipe
        return recipe.fprop.b or recipe.dgrad.b or recipe.wgrad.b


WEIGHT = {"weight": False}
"""``LayerState.weights`` of linear layers."""
