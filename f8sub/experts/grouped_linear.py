"""grouped_linear and grouped_swiglu: each expert's linear layer, or feed-forward, over its own tokens, differentiated.

GroupedMatmul is the three grouped products of one call. Experts run one after the other, each as the linear layer that
it is, for formats that groups of tokens have not. Where a format packs codes, or has a scale of the whole matrix or a
transform along the tokens, an expert's tokens are a matrix of their own. Where groups lie is read on the host for that.

[Note: SwiGLU] Between two products SwiGLU reads gate and up and writes its result, which is read again to be cast;
backward reads and writes twice as much. GatedMatmul casts what it computes from gate and up, so that neither the result
nor the gradients of gate and up are in memory in high precision. It saves for backward what three calls of
``grouped_linear`` save, and nothing for SwiGLU but gate and up.
"""

import contextlib
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from f8sub.errors import Float8ConfigError, Float8ShapeError, Float8Warning
from f8sub.experts import adapters
from f8sub.experts.adapters import Adapted, Transposed
from f8sub.experts.sent import Sent
from f8sub.formats import ALL, HIGH_PRECISION, MULTIPLE, Float8Format, present
from f8sub.kernels import reference
from f8sub.kernels.gemm.select import GROUPED, REFERENCE, Plan
from f8sub.kernels.graph_ops import enter_graph_functions, in_graph
from f8sub.kernels.grouped import ops as grouped_ops
from f8sub.kernels.grouped.gemm import in_high_precision, is_one_by_one
from f8sub.kernels.grouped.operands import (
    BOTH,
    EACH,
    GATE,
    UP,
    ExpertWeights,
    Gated,
    Groups,
    Taken,
    Tokens,
    flat_format,
    seen_transposed,
    unstacked,
)
from f8sub.kernels.quantize import (
    derive_columnwise_of_experts,
    quantize,
    quantize_computed,
    quantize_experts,
    small_part_of,
)
from f8sub.kernels.scales import CURRENT_SOURCES, PriorScale, Sources, scale_now, with_inverse
from f8sub.linear import autocast
from f8sub.linear.converted import plan_of
from f8sub.linear.float8_linear import Float8Matmul, sources_of
from f8sub.linear.saved_input import AUTO
from f8sub.linear.shared_input import cast_or_share, ends_of, sharing_tokens
from f8sub.recipe import Recipe, get_recipe
from f8sub.tensor.float8_tensor import Float8Tensor, UnroundedGradient
from f8sub.torch_compat import (
    apply,
    autocast_dtype,
    change_and_restore,
    compiling,
    constant_result,
    is_dtensor,
    traced,
    untraced,
)
from f8sub.weights.master_weight import MasterWeight, rowwise_of
from f8sub.weights.weight import RAW, Weight, own_parameter, parameters_of, written_raw


class GroupedCall(NamedTuple):
    """One call: the plan, the dtype that x and w are cast from, how the weight is stored, and whence scales come."""

    plan: Plan
    dtype: torch.dtype
    transposed: bool
    sources: Sources = CURRENT_SOURCES


_numbers = itertools.count()


class NeededTokens(NamedTuple):
    """Holds how many tokens per expert a module was converted for, where a conversion did not know how many there are.

    Attributes:
        number: that of the conversion's kind of experts, whose first forward alone is compared.
        recipe: its name.
        gpu: the name of the GPU that the numbers are for.
        enough: tokens per expert from which float8 gains; None where no number is enough.
        enough_gathered: the same where FSDP2 gathers float8 data.
        is_known: whether the conversion knew the tokens, so that these gain if the weights are gathered.
    """

    number: int
    recipe: str
    gpu: str
    enough: int | None
    enough_gathered: int
    is_known: bool

    @classmethod
    def of(
        cls, recipe: str, gpu: str, enough: int | None, enough_gathered: int, *, is_known: bool
    ) -> "NeededTokens":
        """Return those of another kind of experts."""
        return cls(next(_numbers), recipe, gpu, enough, enough_gathered, is_known)

    def __str__(self) -> str:
        gathered = f"{self.enough_gathered:,}"
        if self.enough is None:
            return f"gains from {gathered} tokens per expert where FSDP2 gathers float8 data ({self.gpu})"
        return (
            f"gains from {self.enough:,} tokens per expert, {gathered} where FSDP2 gathers float8 data "
            f"({self.gpu})"
        )

    def compare(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Warn where the first training forward has fewer tokens than are needed.

        Args:
            x: (M, K), the tokens of all experts.
            weight: of E experts, as the product reads it.
        """
        if not torch.is_grad_enabled():
            return
        experts, is_gathered = weight.shape[0], isinstance(weight, Float8Tensor)
        if is_gathered and self.is_known:
            return
        needed = self.enough_gathered if is_gathered else self.enough
        if not torch.compiler.is_compiling():
            _first(self.number, self.recipe, self.gpu, needed, len(x) / max(1, experts))
        elif needed is None or torch.fx.experimental.symbolic_shapes.statically_known_true(
            x.shape[0] < needed * experts
        ):
            # Traced code cannot look at a number of tokens that changes.
            _first(self.number, self.recipe, self.gpu, needed, x.shape[0] / experts)


_compared: set[int] = set()
"""Numbers of kinds of experts whose first forward was compared."""


@constant_result
def _first(number: int, recipe: str, gpu: str, needed: int | None, tokens: float) -> None:
    if number in _compared:
        return
    _compared.add(number)
    if needed is None or tokens < needed:
        gains = f"from {needed:,} on" if needed is not None else "where FSDP2 gathers its weights in float8"
        warnings.warn(
            f"experts have {tokens:,.0f} tokens each in this forward, and {recipe} gains {gains} ({gpu}), "
            "so they may be slower than in bf16: give a GPU more tokens, or convert with experts=False; with tokens=, "
            "of one forward, experts='auto' decides by itself, and with experts='auto_expert_parallel' for weights "
            "that FSDP2 does not gather",
            Float8Warning,
            stacklevel=2,
        )


def refuse_twice() -> None:
    """Refuse, in the backward of experts or of an exchange of their tokens, to be differentiated again.

    Raises:
        NotImplementedError: autograd runs it with gradients enabled, which it does for ``create_graph=True`` alone.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError("experts are differentiated once; create_graph=True asks for twice")


class GroupedMatmul(torch.autograd.Function):
    """The three grouped products over raw tensors."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, call: GroupedCall
    ) -> torch.Tensor:
        plan, dtype, _, sources = call
        recipe, groups = plan.recipe, Groups.of(ends, x.shape[0])
        # Frozen experts, such as those under adapters, have no wgrad, and nothing of x is saved for them.
        spec, columnwise = recipe.fprop, recipe.wgrad.b if ctx.needs_input_grad[1] else None
        tokens = x.to(dtype)
        # y (M, N) = x (M, K) with w (E, N, K), each row by its expert's matrix
        a, kept, _ = cast_or_share(x, tokens, (spec.a, columnwise), plan, sources, groups)
        if a is None or spec.b is None:
            y = grouped_ops.high_precision_rows(tokens, _values(w, call), groups)
        else:
            y = product_of_rows(a, w, groups, call)
        saved: tuple[torch.Tensor, ...] = ()
        if ctx.needs_input_grad[1]:
            saved = (tokens,) if kept is None else tensors_of(kept)
        ctx.save_for_backward(w, ends, *saved)
        ctx.call, ctx.rows, ctx.dtype_of_dw = call, groups.rows, _dtype_of_gradient(w, call)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: D102
        refuse_twice()
        w, ends, *saved = ctx.saved_tensors
        call: GroupedCall = ctx.call
        plan, sources = call.plan, call.sources
        recipe, groups = plan.recipe, Groups.of(ends, ctx.rows)
        dy = dy.contiguous()  # sum() hands over strides of 0
        dx = dw = None
        d, g = recipe.dgrad, recipe.wgrad
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        formats = d.a if needs_dx else None, g.a if needs_dw else None
        a, left, amax = quantize(dy, *formats, sources.dy, groups=groups, multiple=plan.multiple)
        if amax is not None:
            sources.dy.keep(amax)
        # dx (M, K) = dy (M, N) with w (E, N, K), each row by its expert's matrix
        if needs_dx:
            if a is None or d.b is None:
                dx = grouped_ops.high_precision_rows(dy, _values(w, call).transpose(1, 2), groups)
            else:
                dx = gradient_of_rows(a, w, groups, call, dy)
        # dw (E, N, K) = dy.t() (N, M) with x (M, K), each matrix over its expert's rows
        if needs_dw:
            if left is None or g.b is None or plan.wgrad is None:
                dw = grouped_ops.high_precision_weights(dy, saved[0], groups).to(w.dtype)
            else:
                dw = gradient_of_weights(left, saved, ctx.dtype_of_dw, groups, call)
            dw = _gradient_as_stored(dw, w, call)
        return dx, dw, None, None


def tensors_of(kept: Tokens) -> tuple[torch.Tensor, ...]:
    """What backward needs of codes that it sums over: ``gradient_of_weights`` takes them back."""
    return kept.data, kept.scale_inv, kept.groups.first, kept.groups.ends


def product_of_rows(a: Tokens, w: torch.Tensor, groups: Groups, call: GroupedCall) -> torch.Tensor:
    """Return y (M, N) of fprop, of codes of x (M, K) and a weight of N and K as it is stored."""
    spec = call.plan.recipe.fprop
    right = rowwise_of_experts(w, present(spec.b), call)
    return grouped_ops.rows(call.plan.fprop, spec, a, right, groups, call.dtype)


def gradient_of_rows(
    a: Tokens,
    w: torch.Tensor,
    groups: Groups,
    call: GroupedCall,
    after: torch.Tensor,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return dx (M, K) of dgrad, of codes of dy (M, N), plus ``added``.

    ``after`` is made in backward, and its values are not read.
    """
    spec = call.plan.recipe.dgrad
    right = _columnwise(w, present(spec.b), call, after)
    return grouped_ops.rows(call.plan.dgrad, spec, a, right, groups, call.dtype, added)


def gradient_of_weights(
    left: Tokens, saved: Sequence[torch.Tensor], dtype: torch.dtype, groups: Groups, call: GroupedCall
) -> torch.Tensor:
    """Return dw (E, N, K) of wgrad in ``dtype``, of codes of dy and ``tensors_of`` those of x."""
    spec = call.plan.recipe.wgrad
    data, scale_inv, first, ends = saved
    right = Tokens(data, scale_inv, present(spec.b), Groups(first, ends, data.shape[1]), True)
    return grouped_ops.weights(call.plan.wgrad, spec, left, right, groups, dtype)


def _values(w: torch.Tensor, call: GroupedCall) -> torch.Tensor:
    """(E, N, K) in the call's dtype; what the codes stand for of a weight that is gathered in float8."""
    values = _as_stored(w, call.dtype)
    return values.transpose(1, 2) if call.transposed else values


def _as_stored(w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight's values in ``dtype``; no MasterWeight in eager code."""
    if isinstance(w, MasterWeight) and not torch.compiler.is_compiling():
        return w.plain.to(dtype)
    return (w.dequantize() if isinstance(w, Float8Tensor) else w).to(dtype)


def rowwise_of_experts(w: torch.Tensor, format: Float8Format, call: GroupedCall) -> ExpertWeights:
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
        found = _cast_weights(_as_stored(w, call.dtype), stored, prior)
    else:
        found = quantize_experts(_as_stored(w, call.dtype), stored)
    return _brought_to_rows(found, format) if call.transposed else found


def _cast_weights(w: torch.Tensor, format: Float8Format, prior: PriorScale) -> ExpertWeights:
    """Codes of ``w``, (E, N, K), with the prior scales, (E, 1)."""
    # As ``scales.amax``: one bad element does not decide the scale of its neighbours.
    amax = w.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().amax((1, 2)).float()[:, None]
    made = with_inverse(scale_now(prior, amax, format))
    codes = reference.cast(w, made.scale[:, :, None], format.dtype).contiguous()
    return ExpertWeights(codes, made.scale_inv[:, :, None], format)


def _brought_to_rows(stored: ExpertWeights, format: Float8Format) -> ExpertWeights:
    """The rowwise operand of weights whose codes are stored transposed."""
    found = derive_columnwise_of_experts(stored, format, stored.scale_inv)
    # Row-major, as a Float8Linear's: GPUs take nothing else, and a CPU's sums depend on it.
    return found._replace(data=found.data.contiguous())


def _keeps_codes(w: MasterWeight) -> bool:
    """Return whether codes of all experts' rows, one after the other, are kept until the weight changes."""
    return w.is_contiguous() and not torch.compiler.is_compiling()


def _columnwise(w: torch.Tensor, format: Float8Format, call: GroupedCall, dy: torch.Tensor) -> ExpertWeights:
    """All experts' columnwise operand, derived from the rowwise codes, as a linear layer's is; not before ``dy``."""
    rowwise = call.plan.recipe.fprop.b
    if rowwise is None:
        return quantize_experts(_values(w, call).transpose(1, 2), format)
    after = small_part_of(dy, None)
    return derive_columnwise_of_experts(rowwise_of_experts(w, rowwise, call), format, after)


class GatedCall(NamedTuple):
    """The calls of the products: of gate and up together, or of each, and of down."""

    inputs: tuple[GroupedCall, ...]
    down: GroupedCall


class GatedMatmul(torch.autograd.Function):
    """The nine grouped products of a gated feed-forward layer, six where gate and up are one weight.

    Of tokens in the order of their experts; or, with ``Sent``, of tokens in their own, whose casts read them by index.
    """

    @staticmethod
    def forward(  # noqa: D102, PLR0913  (autograd knows no structures)
        ctx: Any,
        x: torch.Tensor,
        ends: torch.Tensor,
        order: torch.Tensor | None,
        back: torch.Tensor | None,
        weights: torch.Tensor | None,
        calls: GatedCall,
        down: torch.Tensor,
        # Not *inputs: where dynamo calls this without gradients it counts parameters to know whether one is ctx.
        gate: torch.Tensor,
        up: torch.Tensor | None,
    ) -> torch.Tensor:
        inputs = [gate] if up is None else [gate, up]
        sent = _sent(order, back, weights)
        # Not len(), for which a graph would have to know the number.
        groups = Groups.of(ends, (x if sent is None else sent.order).shape[0])
        first = calls.inputs[0]
        recipe = first.plan.recipe
        needs_x, needs_weights, needs_down, needs_inputs = _needs(ctx, len(inputs))
        needs_dh = needs_x or any(needs_inputs)
        # y (M, 2 N) of one weight, or (M, N) of each
        formats = present(recipe.fprop.a), recipe.wgrad.b if any(needs_inputs) else None
        tokens = x.to(first.dtype)
        if sent is None:
            a, kept_x, _ = cast_or_share(x, tokens, formats, first.plan, first.sources, groups)
        else:
            a, kept_x, _ = quantize_computed(
                Taken(tokens, sent.tokens), *formats, groups, first.plan.multiple
            )
        results = [
            product_of_rows(present(a), w, groups, call) for w, call in zip(inputs, calls.inputs, strict=True)
        ]
        recipe, plan = calls.down.plan.recipe, calls.down.plan
        formats = present(recipe.fprop.a), recipe.wgrad.b if needs_down else None
        h, kept_h, _ = quantize_computed(Gated(*_halves(results)), *formats, groups, plan.multiple)
        y = product_of_rows(present(h), down, groups, calls.down)
        saved: list[Sequence[torch.Tensor]] = [
            inputs,
            *(() if kept is None else tensors_of(kept) for kept in (kept_x, kept_h)),
            # Where down alone trains, nothing reads them again.
            results if needs_dh else (),
        ]
        if sent is not None:
            placed = sent.by_token(y)
            y = sent.combined(placed, ends)
            if y.dtype != x.dtype:
                # Torch 2.11 compiles a function that returns what .to() did not change to one without gradients.
                y = y.to(x.dtype)
            saved += [sent, (placed,) if needs_weights else ()]
        ctx.save_for_backward(ends, down, *itertools.chain(*saved))
        ctx.calls, ctx.rows, ctx.dtype, ctx.lengths = calls, groups.rows, x.dtype, list(map(len, saved))
        ctx.dtype_of_ddown = _dtype_of_gradient(down, calls.down)
        ctx.dtypes = [_dtype_of_gradient(w, call) for w, call in zip(inputs, calls.inputs, strict=True)]
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: D102
        refuse_twice()
        ends, down, *rest = ctx.saved_tensors
        calls: GatedCall = ctx.calls
        inputs, saved_x, saved_h, results, *of_sent = _parted(rest, ctx.lengths)
        sent = Sent(*of_sent[0]) if of_sent else None
        groups = Groups.of(ends, ctx.rows)
        needs_dx, needs_weights, needs_down, needs_inputs = _needs(ctx, len(inputs))
        # Above the first layer that trains dh may be needed by none.
        needs_dh = needs_dx or any(needs_inputs)
        dy = dy.contiguous()  # sum() hands over strides of 0
        formats = _formats_of_dy(calls.down, needs_dh, needs_down)
        a, left = _codes_of_dy(dy, sent, formats, groups, calls.down)
        dh = dx = ddown = dweights = None
        if sent is not None and needs_weights:
            dweights = sent.gradient_of_weights(of_sent[1][0], dy, ends)
        if needs_dh:
            dh = gradient_of_rows(present(a), down, groups, calls.down, dy)
        if needs_down:
            ddown = gradient_of_weights(present(left), saved_h, ctx.dtype_of_ddown, groups, calls.down)
            ddown = _gradient_as_stored(ddown, down, calls.down)
        needs = [(needs_dx, needs_dw) for needs_dw in needs_inputs]
        codes = (
            [(None, None)] * len(inputs) if dh is None else _codes(calls.inputs, results, dh, needs, groups)
        )
        dinputs: list[torch.Tensor | None] = []
        each = zip(inputs, calls.inputs, ctx.dtypes, codes, needs_inputs, strict=True)
        for w, call, dtype, (a, left), needs_dw in each:
            if needs_dx:
                if dx is not None and dx.dtype != ctx.dtype:
                    # autograd adds the gradients of one tensor in its dtype.
                    dx = dx.to(ctx.dtype) + gradient_of_rows(present(a), w, groups, call, present(dh)).to(
                        ctx.dtype
                    )
                else:
                    dx = gradient_of_rows(present(a), w, groups, call, present(dh), dx)
            dw = None
            if needs_dw:
                dw = gradient_of_weights(present(left), saved_x, dtype, groups, call)
                dw = _gradient_as_stored(dw, w, call)
            dinputs.append(dw)
        if sent is not None and dx is not None:
            dx = sent.by_token(dx.to(ctx.dtype)).sum(1)
        return dx, None, None, None, dweights, None, ddown, *_pair(dinputs)


_TracedGrouped, _TracedGated = traced(GroupedMatmul), traced(GatedMatmul)


@in_graph
def _grouped_node(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, key: str, dtype: torch.dtype, transposed: bool
) -> torch.Tensor:
    """Multiply by a weight of float8 data: dynamo can make no gradient of it that is not rounded yet.

    Nor can it look into what ``to_local`` returns of one.
    """
    with compiling():
        call = GroupedCall(Plan.made[key], dtype, transposed)
        y: torch.Tensor = _TracedGrouped.apply(x, local_part(weight), ends, call)
        return y


@in_graph
def _gated_node(
    x: torch.Tensor,
    ends: torch.Tensor,
    sent: tuple[torch.Tensor | None, ...],
    keys: tuple[str, ...],
    dtype: torch.dtype,
    transposed: tuple[bool, ...],
    weights: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """``GatedMatmul`` of such weights, down last."""
    with compiling():
        *inputs, down = (
            GroupedCall(Plan.made[key], dtype, each) for key, each in zip(keys, transposed, strict=True)
        )
        *parts, part_of_down = map(local_part, weights)
        given = x, ends, *sent, GatedCall(tuple(inputs), down), part_of_down, *_pair(parts)
        y: torch.Tensor = _TracedGated.apply(*given)
        return y


def _sent(order: torch.Tensor | None, back: torch.Tensor | None, weights: torch.Tensor | None) -> Sent | None:
    return None if order is None else Sent(order, present(back), present(weights))


def _pair(each: Sequence[Any]) -> tuple[Any, Any]:
    """Return what is of gate and of up; None as the latter where one weight is both."""
    gate, up = (*each, None)[:2]
    return gate, up


def _needs(ctx: Any, count: int) -> tuple[bool, bool, bool, tuple[bool, ...]]:
    """Return whether x, the weights of ``Sent``, down, and each of the ``count`` other weights need gradients."""
    x, _, _, _, weights, _, down, gate, up = ctx.needs_input_grad
    return x, weights, down, (gate, up)[:count]


def _codes_of_dy(
    dy: torch.Tensor,
    sent: Sent | None,
    formats: tuple[Float8Format | None, Float8Format | None],
    groups: Groups,
    call: GroupedCall,
) -> tuple[Tokens | None, Tokens | None]:
    """Return the operands of dy, (M, K), or, with ``sent``, of what is read and multiplied of the tokens' dy."""
    multiple = call.plan.multiple
    if sent is not None:
        taken = Taken(dy, sent.tokens, sent.factors)
        if dy.dtype == call.dtype:
            return quantize_computed(taken, *formats, groups, multiple)[:2]
        # Under autocast products have another dtype than what is cast, and are rounded once more.
        dy = taken._replace(x=dy.to(sent.dtype_with(call.dtype))).values().to(call.dtype)
    return quantize(dy, *formats, groups=groups, multiple=multiple)[:2]


def _parted(tensors: list[torch.Tensor], lengths: Iterable[int]) -> list[list[torch.Tensor]]:
    rest = iter(tensors)
    return [list(itertools.islice(rest, length)) for length in lengths]


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
        a, left, _ = quantize_computed(gated._replace(side=BOTH), *formats[0], groups, multiple)
        return [(a, left)]
    # With scales of groups both are cast by one launch.
    if formats[0] == formats[1] and all(format is None or format.tile.cols == ALL for format in formats[0]):
        a, left, _ = quantize_computed(gated._replace(side=EACH), *formats[0], groups, multiple)
        return list(zip(_unstacked(a), _unstacked(left), strict=True))
    found: list[tuple[Tokens | None, Tokens | None]] = []
    for side, own in zip((GATE, UP), formats, strict=True):
        # Of a frozen weight, and an x that needs no gradient, there is nothing to cast.
        if own == (None, None):
            found.append((None, None))
            continue
        a, left, _ = quantize_computed(gated._replace(side=side), *own, groups, multiple)
        found.append((a, left))
    return found


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


def _dtype_of_gradient(w: torch.Tensor, call: GroupedCall) -> torch.dtype:
    backend = call.plan.wgrad
    # A transposed one is copied in any case, and rounded there.
    if backend is None or GROUPED[backend].rounds or call.transposed or not isinstance(w, Float8Tensor):
        return w.dtype
    return w.wgrad_dtype


def _gradient_as_stored(dw: torch.Tensor, w: torch.Tensor, call: GroupedCall) -> torch.Tensor:
    if call.transposed:
        return dw.transpose(1, 2)
    return dw if dw.dtype == w.dtype else UnroundedGradient(dw, w.dtype)


@untraced
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: Groups,
    recipe: Recipe,
    dtype: torch.dtype,
    transposed: bool,
) -> torch.Tensor:
    """``grouped_linear`` of a weight of (E, N, K), or (E, K, N) where ``transposed``; y in ``dtype``."""
    call = Plan.make(recipe, torch.device(x.device.type), REFERENCE), dtype, CURRENT_SOURCES
    counts = [end - first for first, end in groups.host_bounds]
    # Rows past the last group are of no expert, and their y is zero.
    *parts, past = x.split([*counts, len(x) - sum(counts)])
    found = [
        apply(Float8Matmul, part, stored.t() if transposed else stored, None, call, AUTO, False)
        for part, stored in zip(parts, weight.unbind(0), strict=True)
    ]
    width = weight.shape[2 if transposed else 1]
    return torch.cat([*found, past.new_zeros((len(past), width), dtype=dtype)])


class Multiplied(NamedTuple):
    """One product of ``grouped_linear``: this rank's factors and the result; ``call`` is None without a recipe."""

    x: torch.Tensor
    weight: torch.Tensor
    groups: Groups
    call: GroupedCall | None
    y: torch.Tensor


Watch = Callable[[Any, Multiplied], None]
"""Called after a product, with the converted module whose forward runs, or that the weight is of."""

_watchers: list[Watch] = []


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Have ``watch`` called after every product within it, of any thread."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


class Forward:
    """A forward of a converted module, which has a plan, a name and weights; and whether it multiplied."""

    def __init__(self, module: Any) -> None:
        self.module, self._called = module, False

    def calls(self) -> None:
        """A product was called."""
        if torch.compiler.is_compiling():
            _multiplies(type(self.module).__name__)
        else:
            self._called = True

    @property
    def multiplied(self) -> bool:
        """True if the forward called a product, or compiled code in it has one."""
        return self._called or _is_traced(type(self.module).__name__)


_traced: set[str] = set()
"""The classes whose products were ever traced; not the modules, for equal blocks share their compiled code."""


@constant_result
def _multiplies(kind: str) -> None:
    """Enter a class in ``_traced`` at once: in a checkpointed function dynamo refuses to write to what is outside."""
    _traced.add(kind)


@constant_result
def _is_traced(kind: str) -> bool:
    return kind in _traced


class _Running(threading.local):
    """The forwards that run in this thread, the innermost last."""

    def __init__(self) -> None:
        # Of each thread its own: autograd repeats checkpointed forwards on threads of its own.
        self.stack: list[Forward] = []


_running = _Running()


@contextlib.contextmanager
def running(module: torch.nn.Module) -> Iterator[Forward]:
    """Calls of ``grouped_linear`` without a recipe take this module's plan, and their errors its name."""
    stack, forward = _running.stack, Forward(module)
    if torch.compiler.is_compiling():
        # The trace finds the module here. It undoes this before it ends, so that compiled code writes to no stack.
        change_and_restore(stack.append, forward)
        try:
            yield forward
        finally:
            change_and_restore(stack.pop)
        return
    stack.append(forward)
    try:
        with sharing_tokens():
            yield forward
    finally:
        stack.pop()


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    recipe: Recipe | str | None = None,
    *,
    transposed: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """``y = x @ w.t()`` for each expert's weight and its tokens, in float8 by a recipe.

    Every expert's y, dx and dw are those of a ``Float8Linear`` of it on its own tokens.

    Args:
        x: (M, K), sorted by expert.
        weight: (E, N, K), one matrix an expert, as parameter, plain tensor, or gathered in float8 by FSDP2;
            of a DTensor this rank's experts.
        offs: integers, (E,): the row after each expert's last one, as ``torch.nn.functional.grouped_mm`` takes it.
            Rows past the last are of no expert; y and dx are zero there.
        recipe: None for that of the converted module whose forward calls this or that the weight is of, or of the
            context that ``autocast`` entered for it; high precision in any other.
        transposed: whether the weight is stored as (E, K, N).
        backend: see ``Plan.make``; with a recipe only.

    Returns:
        (M, N), in x's dtype or that of ``torch.autocast``.

    Raises:
        Float8ShapeError: shapes that do not fit; on a CPU, where that costs nothing, also ends that do not ascend
            from 0 to at most M.
        Float8ConfigError: a recipe with delayed scaling, and no weight of a converted module whose forward runs.
    """
    if isinstance(weight, Adapted):
        # Apart, because the sum's codes would lose what the adapters add.
        own = grouped_linear(x, weight.source, offs, recipe, transposed=transposed, backend=backend)
        groups = Groups.of(ends_of(offs), len(x))
        return own + weight.of_tokens(x.to(own.dtype), groups, transposed=transposed)
    made = prepared(x, weight, offs, recipe, transposed=transposed, backend=backend)
    owner, weight, groups, call = made.owner, made.weight, made.groups, made.call
    if call is None:
        y = in_high_precision(x, weight.transpose(1, 2) if transposed else weight, groups)
    else:
        y = _multiplied(x, made, call)
        if autocast.was_entered and made.module is not None:
            autocast.remember(made.module, call.plan, y)
    for watch in _watchers:
        watch(owner, Multiplied(x, weight, groups, call, y))
    return y


class Prepared(NamedTuple):
    """One call of ``grouped_linear`` before it multiplies.

    Attributes:
        owner: the converted module whose forward runs, or that the weight is of; None for none.
        module: the same where its plan is used.
        weight: this rank's part, as it is stored.
        groups: of the tokens.
        call: None in high precision, where the weight is as it was given.
        whole: in compiled code the weight of float8 data as it was given, a DTensor for one, for a node to read.
    """

    owner: Any
    module: Any
    weight: torch.Tensor
    groups: Groups
    call: GroupedCall | None
    whole: torch.Tensor | None


def prepared(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    recipe: Recipe | str | None,
    *,
    transposed: bool,
    backend: str,
) -> Prepared:
    """Check the arguments of ``grouped_linear``, of which x may be without values, and find its plan."""
    owner = _module_of(weight)
    module, plan = (owner, None) if recipe is None else (None, _plan_of(recipe, x.device.type, backend))
    if module is not None:
        plan = _plan_in_use(module, x, weight)
    sources = CURRENT_SOURCES
    if plan is not None and plan.recipe.scaling is not None:
        sources = _sources_of(module, owner, plan.recipe, weight)
    given, weight = weight, local_part(weight)
    _check(owner, x, weight, offs, transposed)
    groups = Groups.of(ends_of(offs), len(x))
    if plan is None:
        return Prepared(owner, module, weight, groups, None, None)
    if isinstance(weight, Transposed) or not (weight.is_contiguous() or isinstance(weight, Float8Tensor)):
        # As it is stored, where codes of it are kept or were gathered.
        weight, transposed = _transposed_back(module, weight), not transposed
    if module is not None and module._f8sub.needed is not None:
        module._f8sub.needed.compare(x, weight)
    call = GroupedCall(plan, autocast_dtype(x.device.type) or x.dtype, transposed, sources)
    is_closed = torch.compiler.is_compiling() and isinstance(weight, Float8Tensor)
    whole = (given if is_dtensor(given) else weight) if is_closed else None
    return Prepared(owner, module, weight, groups, call, whole)


def multiply(x: torch.Tensor, weight: torch.Tensor, groups: Groups, call: GroupedCall) -> torch.Tensor:
    """The product of a call: that of all groups, or each expert's by itself where its recipe has no other."""
    if is_one_by_one(call.plan.recipe):
        return linear(x, weight, groups, call.plan.recipe, call.dtype, call.transposed)
    y: torch.Tensor = apply(GroupedMatmul, x, weight, groups.ends, call)
    return y


def _multiplied(x: torch.Tensor, made: Prepared, call: GroupedCall) -> torch.Tensor:
    """``multiply`` of what was prepared."""
    if made.whole is None or is_one_by_one(call.plan.recipe) or call.plan.recipe.scaling is not None:
        return multiply(x, made.weight, made.groups, call)
    enter_graph_functions()
    return _grouped_node(x, made.whole, made.groups.ends, call.plan.key, call.dtype, call.transposed)


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
    scaling, adapters, other recipes for gate than for up, or a product in high precision it is computed by itself.

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
        Float8ShapeError: shapes that do not fit, gate's and up's among them, or an odd number of rows of both.
        Float8ConfigError: as of ``grouped_linear``.
    """
    inputs = [gate] if up is None else [gate, up]
    how: dict[str, Any] = {"transposed": transposed, "backend": backend}
    found = _calls(x, inputs, down, offs, recipe, how)
    if found is None:
        results = [grouped_linear(x, w, offs, recipe, **how) for w in inputs]
        return grouped_linear(act(*_halves(results)), down, offs, recipe, **how)
    return _gated(x, None, *found)


def sent_swiglu(
    x: torch.Tensor,
    sent: Sent,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    offs: torch.Tensor,
    *,
    transposed: bool,
) -> torch.Tensor | None:
    """``grouped_swiglu`` of tokens that are read where they lie, and ``sent``'s weighting of its results.

    Args:
        x: (T, K), tokens in their own order.
        sent: of M rows, which tokens they are; those of other experts than these come last.
        gate_up: (E, 2 N, K), gate's rows before up's.
        down: (E, K, N).
        offs: as of ``grouped_linear``.
        transposed: as of ``grouped_swiglu``.

    Returns:
        (T, K), in x's dtype; None where ``grouped_swiglu`` computes SwiGLU by itself.
    """
    # Of the rows, which are not in memory, the shape alone is looked at.
    rows = x.new_empty(1).expand(len(sent.order), x.shape[1])
    found = _calls(rows, [gate_up], down, offs, None, {"transposed": transposed, "backend": "auto"})
    return None if found is None else _gated(x, sent, *found)


def _gated(x: torch.Tensor, sent: Sent | None, made: list["Prepared"], calls: GatedCall) -> torch.Tensor:
    of_sent = (None, None, None) if sent is None else tuple(sent)
    ends, of_each = made[0].groups.ends, (*calls.inputs, calls.down)
    y: torch.Tensor
    if all(each.whole is None for each in made):
        *inputs, down = (each.weight for each in made)
        y = apply(GatedMatmul, x, ends, *of_sent, calls, down, *_pair(inputs))
    else:
        enter_graph_functions()
        keys, transposed = (
            tuple(call.plan.key for call in of_each),
            tuple(call.transposed for call in of_each),
        )
        weights = tuple(each.weight if each.whole is None else each.whole for each in made)
        y = _gated_node(x, ends, of_sent, keys, calls.down.dtype, transposed, weights)
    if autocast.was_entered:
        # The weights may be of three modules, of which each is asked for its plan when the forward is repeated.
        for each in made:
            if each.module is not None:
                autocast.remember(each.module, present(each.call).plan, y)
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
    gate = inputs[0]
    rows = gate.shape[2 if how["transposed"] else 1] if gate.dim() == 3 else 0
    if rows % 2 if len(inputs) == 1 else inputs[1].shape != gate.shape:
        raise Float8ShapeError(
            "grouped_swiglu takes gate and up of one shape, or one weight of both, whose rows are even, got "
            f"{' and '.join(str(tuple(w.shape)) for w in inputs)}"
        )
    if _watchers or any(isinstance(w, Adapted) for w in (*inputs, down)):
        return None
    made: list[Prepared] = []
    for w in inputs:
        made.append(prepared(x, w, offs, recipe, **how))
        if not _is_gated(made[-1].call):
            return None
    call = present(made[0].call)
    # Weights of two modules may have two recipes, and x is cast by one.
    if any(present(each.call).plan.key != call.plan.key for each in made):
        return None
    # Of this rank's part, which tensor parallelism may have cut out.
    width = made[0].weight.shape[2 if call.transposed else 1] * len(inputs) // 2
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


def _module_of(weight: torch.Tensor) -> Any:
    """The converted module whose forward runs, or that the weight is of; None for no module."""
    if not _running.stack:
        return adapters.owner_of(weight)
    forward = _running.stack[-1]
    forward.calls()
    return forward.module


def _plan_in_use(module: Any, x: torch.Tensor, weight: torch.Tensor) -> Plan:
    state = module._f8sub
    if state.plan.device.type != (device := x.device).type:
        state.follow(device)
    plan: Plan = state.plan
    # Which of its weights it is matters to contexts, and to what backward repeats in eager code.
    if not autocast.was_entered and torch.compiler.is_compiling():
        return plan
    name = adapters.name_in(module, weight)
    if name is None:
        adapters.note(module, weight)
    return plan_of(module, weight if name is None else own_parameter(module, name))  # type: ignore[no-any-return]


class _Plans:
    """The plans of recipes that calls named, each an attribute: dynamo guards on the one that it reads."""


_plans: Any = _Plans()


def _plan_of(recipe: Recipe | str, device: str, backend: str) -> Plan:
    if not isinstance(recipe, str):
        return Plan.make(recipe, torch.device(device), backend, grouped=True)
    plan: Plan = getattr(_plans, _named(recipe, device, backend))
    return plan


@constant_result
def _named(recipe: str, device: str, backend: str) -> str:
    """The attribute of ``_plans`` that holds the plan."""
    name = f"{recipe} on {device} by {backend}"
    if not hasattr(_plans, name):
        setattr(_plans, name, Plan.make(get_recipe(recipe), torch.device(device), backend, grouped=True))
    return name


def _sources_of(module: Any, owner: Any, recipe: Recipe, weight: torch.Tensor) -> Sources:
    """The sources of a product with a weight of a converted module, which holds what they are made of."""
    if module is not None and (name := adapters.name_in(module, weight)) is not None:
        return sources_of(module, recipe, name)
    raise Float8ConfigError(
        f"{_name_of(owner)}: recipe {recipe.name!r} keeps a past of each weight, and this weight of "
        f"{tuple(weight.shape)} is no parameter of a converted module whose forward runs, nor a view of one; convert "
        "the module, give grouped_linear its parameter as it is, and no recipe"
    )


def name_of_read(module: torch.nn.Module, names: Iterable[str], weight: torch.Tensor) -> str | None:
    """Return which of a module's weights, given by name, ``weight`` is; or was computed from, for one forward."""
    if (
        found := next((n for n in names if adapters.is_of(weight, own_parameter(module, n))), None)
    ) is not None:
        return found
    # Each forward has another tensor of it, whose graph alone tells.
    leaves = set() if weight.grad_fn is None else _leaves_behind(weight.grad_fn)
    return next((n for n in names if not leaves.isdisjoint(map(id, parameters_of(module, n)))), None)


def _leaves_behind(node: Any) -> set[int]:
    """Return the ids of the parameters that a node of autograd was computed from."""
    found, seen, left = set(), set(), [node]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        left += [before for before, _ in node.next_functions if before is not None]
    return found


def _transposed_back(module: Any, weight: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling() and isinstance(weight, Transposed):
        # The parameter itself: dynamo cannot look into a subclass that the graph made.
        for name in () if module is None else module._f8sub.weights:
            if weight._base is (parameter := own_parameter(module, name)):
                return parameter
    return weight.transpose(1, 2)


def local_part(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight that expert parallelism shards; its gradient is that part's."""
    # Each rank computes all of the gradient of its experts, so no sum over ranks is left.
    return weight.to_local(grad_placements=weight.placements) if is_dtensor(weight) else weight


def _name_of(owner: Any) -> str:
    """The module's name, for errors alone: torch 2.11 compiles once more for each name that traced code reads."""
    return "grouped_linear or grouped_swiglu" if owner is None else str(owner._f8sub.fqn)


def _check(owner: Any, x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, transposed: bool) -> None:
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(
            f"{_name_of(owner)}: experts take tokens of {', '.join(map(str, HIGH_PRECISION))}, got {x.dtype} of shape "
            f"{tuple(x.shape)}; convert them with .to(torch.bfloat16)"
        )
    if owner is not None and weight.dtype in RAW:
        raise written_raw(_name_of(owner), weight.dtype)
    dtype = getattr(offs, "dtype", type(offs).__name__)
    if dtype not in (torch.int32, torch.int64):
        raise Float8ShapeError(
            f"{_name_of(owner)}: ends of groups are a tensor of integers, got {dtype}; pass counts.cumsum(0)"
        )
    depth = weight.shape[1 if transposed else 2] if weight.dim() == 3 else None
    if x.dim() != 2 or depth != x.shape[-1] or offs.shape != weight.shape[:1]:
        raise Float8ShapeError(
            f"{_name_of(owner)}: a grouped linear layer takes x (M, K), a weight of "
            f"{'(E, K, N)' if transposed else '(E, N, K)'} and E ends, got {tuple(x.shape)}, {tuple(weight.shape)} and "
            f"{tuple(offs.shape)}; look at what dispatches the tokens"
        )
    # On a GPU the host would wait for the ends.
    if offs.is_cpu and offs.numel() and type(offs) is torch.Tensor and not torch.compiler.is_compiling():
        ends = offs.tolist()
        if ends[0] < 0 or ends != sorted(ends) or ends[-1] > len(x):
            raise Float8ShapeError(
                f"{_name_of(owner)}: ends of groups ascend from 0 to at most the {len(x)} rows of x, got {ends}; "
                "tokens are sorted by expert, and their counts add up to no more than the rows"
            )
    if x.is_cuda and any(size % MULTIPLE for size in weight.shape[1:]):
        raise Float8ShapeError(
            f"{_name_of(owner)}: the dimensions of grouped products on a GPU are multiples of {MULTIPLE}, got a "
            f"weight of {tuple(weight.shape)}"
        )
