"""grouped_linear: each expert's linear layer over its own tokens, differentiated."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from f8sub.errors import Float8ConfigError, Float8ShapeError
from f8sub.features.experts import nodes, one_by_one
from f8sub.features.experts.operands import Tokens, flat_format, quantize_both
from f8sub.features.experts.products import GroupedPlan, is_one_by_one
from f8sub.features.experts.transposed import Transposed
from f8sub.formats import HIGH_PRECISION, MULTIPLE, Float8Format
from f8sub.kernels import ops
from f8sub.kernels.experts import ExpertWeights, seen_transposed
from f8sub.kernels.groups import Groups
from f8sub.kernels.quantize import derive_columnwise_of_experts, quantize_experts
from f8sub.linear.weight_cast import rowwise_of
from f8sub.recipe import Recipe, get_recipe
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import apply, autocast_dtype, constant_result, is_dtensor
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.weight import Weight


class Call(NamedTuple):
    """One call: the plan, the dtype that x and w are cast from, and how the weight is stored."""

    plan: GroupedPlan
    dtype: torch.dtype
    transposed: bool


class Product(NamedTuple):
    """What a call of ``grouped_linear`` multiplied, as it lies on this rank, and the result."""

    x: torch.Tensor
    weight: torch.Tensor
    groups: Groups
    call: Call
    y: torch.Tensor


watchers: list[Callable[[str, Product], None]] = []
"""Called after every product in float8, with the name of the converted module whose forward runs."""


class _Running(threading.local):
    """The plan and the name of the converted module whose forward runs in this thread."""

    def __init__(self) -> None:
        self.stack: list[tuple[GroupedPlan, str]] = []


_running = _Running()


@contextlib.contextmanager
def running(plan: GroupedPlan, fqn: str) -> Iterator[None]:
    """Calls of ``grouped_linear`` without a recipe take this plan, and their errors this name."""
    _running.stack.append((plan, fqn))
    try:
        yield
    finally:
        _running.stack.pop()


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
        recipe: None for that of the converted module whose forward calls this, and high precision in any other.
        transposed: whether the weight is stored as (E, K, N).
        backend: see ``GroupedPlan.make``; with a recipe only.

    Returns:
        (M, N), in x's dtype or that of ``torch.autocast``.

    Raises:
        Float8ShapeError: shapes that do not fit; on a CPU, where that costs nothing, also ends that do not ascend
            from 0 to at most M.
        Float8ConfigError: a recipe that experts do not take.
    """
    plan, fqn = _running.stack[-1] if _running.stack else (None, "grouped_linear")
    if recipe is not None:
        plan = _plan_of(recipe, x.device.type, backend)
    weight = local_part(weight)
    _check(fqn, x, weight, offs, transposed)
    groups = Groups.of(offs.to(torch.int32), len(x))
    if plan is None:
        return _in_high_precision(x, weight.transpose(1, 2) if transposed else weight, groups)
    if isinstance(weight, Transposed) or not (weight.is_contiguous() or isinstance(weight, Float8Tensor)):
        # As it is stored, where codes of it are kept or were gathered.
        weight, transposed = weight.transpose(1, 2), not transposed
    dtype = autocast_dtype(x.device.type) or x.dtype
    if is_one_by_one(plan.recipe):
        return one_by_one.linear(x, weight, groups, plan.recipe, dtype, transposed)
    call = Call(plan, dtype, transposed)
    y: torch.Tensor = apply(_GroupedLinear, x, weight, groups.ends, call)
    for watch in watchers:
        watch(fqn, Product(x, weight, groups, call, y))
    return y


class _Plans:
    """The plans of recipes that calls named, each an attribute: dynamo guards on the one that it reads."""


_plans: Any = _Plans()


def _plan_of(recipe: Recipe | str, device: str, backend: str) -> GroupedPlan:
    if not isinstance(recipe, str):
        return GroupedPlan.make(recipe, torch.device(device), backend)
    plan: GroupedPlan = getattr(_plans, _named(recipe, device, backend))
    return plan


@constant_result
def _named(recipe: str, device: str, backend: str) -> str:
    """The attribute of ``_plans`` that holds the plan."""
    name = f"{recipe} on {device} by {backend}"
    if not hasattr(_plans, name):
        setattr(_plans, name, GroupedPlan.make(get_recipe(recipe), torch.device(device), backend))
    return name


def local_part(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight that expert parallelism shards; its gradient is that part's."""
    return weight.to_local(grad_placements=weight.placements) if is_dtensor(weight) else weight


def _check(fqn: str, x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, transposed: bool) -> None:
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(
            f"{fqn}: experts take tokens of {', '.join(map(str, HIGH_PRECISION))}, got {x.dtype} of shape "
            f"{tuple(x.shape)}; convert them with .to(torch.bfloat16)"
        )
    depth = weight.shape[1 if transposed else 2] if weight.dim() == 3 else None
    if x.dim() != 2 or depth != x.shape[-1] or offs.shape != weight.shape[:1]:
        raise Float8ShapeError(
            f"{fqn}: a grouped linear layer takes x (M, K), a weight of {'(E, K, N)' if transposed else '(E, N, K)'} "
            f"and E ends, got {tuple(x.shape)}, {tuple(weight.shape)} and {tuple(offs.shape)}; look at what "
            "dispatches the tokens"
        )
    if offs.dtype not in (torch.int32, torch.int64):
        raise Float8ShapeError(f"{fqn}: ends of groups are integers, got {offs.dtype}; pass counts.cumsum(0)")
    if offs.is_cpu and offs.numel() and type(offs) is torch.Tensor and not torch.compiler.is_compiling():
        ends = offs.tolist()
        if ends[0] < 0 or ends != sorted(ends) or ends[-1] > len(x):
            raise Float8ShapeError(
                f"{fqn}: ends of groups ascend from 0 to at most the {len(x)} rows of x, got {ends}; tokens are sorted "
                "by expert, and their counts add up to no more than the rows"
            )
    if x.is_cuda and any(size % MULTIPLE for size in weight.shape[1:]):
        raise Float8ShapeError(
            f"{fqn}: the dimensions of grouped products on a GPU are multiples of {MULTIPLE}, got a weight of "
            f"{tuple(weight.shape)}"
        )


def _in_high_precision(x: torch.Tensor, w: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Torch's own, with zeros in the rows past the last group, which it leaves as they are, in y and dx."""
    past = groups.past
    y = torch._grouped_mm(x.masked_fill(past, 0), w.transpose(1, 2), offs=groups.ends)
    return y.masked_fill(past, 0)


class _GroupedLinear(torch.autograd.Function):
    """The three grouped products over raw tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, call: Call) -> torch.Tensor:
        plan, dtype, _ = call
        recipe, groups, x = plan.recipe, Groups.of(ends, len(x)), x.to(dtype)
        spec = recipe.fprop
        a, kept = quantize_both(
            x, groups, spec.a, recipe.wgrad.b if ctx.needs_input_grad[1] else None, plan.multiple
        )
        if a is None or spec.b is None:
            y = nodes.high_precision_rows(x, _values(w, call), groups)
        else:
            y = nodes.rows(plan.fprop, spec, a, rowwise_of_experts(w, spec.b, call), groups, dtype)
        saved: tuple[torch.Tensor, ...] = ()
        if ctx.needs_input_grad[1]:
            saved = (x,) if kept is None else (kept.data, kept.scale_inv, kept.groups.first, kept.groups.ends)
        ctx.save_for_backward(w, ends, *saved)
        ctx.call, ctx.rows = call, len(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError("experts are differentiated once; create_graph=True asks for twice")
        w, ends, *saved = ctx.saved_tensors
        call: Call = ctx.call
        plan, dtype, _ = call
        recipe, groups = plan.recipe, Groups.of(ends, ctx.rows)
        dy = dy.contiguous()  # sum() hands over strides of 0
        dx = dw = None
        d, g = recipe.dgrad, recipe.wgrad
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        a, left = quantize_both(
            dy, groups, d.a if needs_dx else None, g.a if needs_dw else None, plan.multiple
        )
        if needs_dx:
            if a is None or d.b is None:
                dx = nodes.high_precision_rows(dy, _values(w, call).transpose(1, 2), groups)
            else:
                dx = nodes.rows(plan.dgrad, d, a, _columnwise(w, d.b, call, dy), groups, dtype)
        if needs_dw:
            if left is None or g.b is None or plan.wgrad is None:
                dw = nodes.high_precision_weights(dy, saved[0], groups).to(w.dtype)
            else:
                data, scale_inv, first, stops = saved
                right = Tokens(data, scale_inv, g.b, Groups(first, stops, data.shape[1]), True)
                dw = nodes.weights(plan.wgrad, g, left, right, groups, w.dtype)
            dw = dw.transpose(1, 2) if call.transposed else dw
        return dx, dw, None, None


def _values(w: torch.Tensor, call: Call) -> torch.Tensor:
    """(E, N, K) in the call's dtype, of a weight that is not gathered in float8."""
    values = _as_stored(w, call.dtype)
    return values.transpose(1, 2) if call.transposed else values


def _as_stored(w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight's values in ``dtype``; no MasterWeight in eager code."""
    if isinstance(w, MasterWeight) and not torch.compiler.is_compiling():
        return w.plain.to(dtype)
    return w.to(dtype)


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
        found = ExpertWeights.of(rowwise_of(rows, flat, call.dtype), tuple(w.shape), stored)
    elif isinstance(w, Weight) and not isinstance(w, MasterWeight) and flat is not None:
        found = ExpertWeights.of(type(w).rowwise_codes(w, flat, call.dtype), tuple(w.shape), stored)
    else:
        return nodes.rowwise_of_weights(_as_stored(w, call.dtype), format, call.transposed)
    return nodes.brought_to_rows(found, format) if call.transposed else found


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
