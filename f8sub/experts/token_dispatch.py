"""exchange_tokens: an all-to-all of rows, in float8 in one direction and as they are in the other, differentiated.

Source: DeepSeek-V3 (arXiv 2412.19437, 3.3), which dispatches in float8 and combines in bfloat16.

torchtitan's dispatchers of tokens then exchange tokens in float8.
"""

import functools
import importlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from f8sub.errors import Float8ConfigError, Float8ShapeError, refuse_other_than_a_module
from f8sub.experts.grouped_linear import refuse_twice
from f8sub.formats import HIGH_PRECISION, Float8Format
from f8sub.kernels.ops import operator
from f8sub.kernels.row_bytes import of_bytes, rows_as_bytes, rows_of_bytes
from f8sub.recipe import Recipe, get_recipe
from f8sub.torch_compat import apply, constant_result, parameters_of, rows_over_ranks


def exchange_tokens(
    x: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: dist.ProcessGroup | None = None,
    *,
    recipe: Recipe | str,
    combine: bool = False,
) -> torch.Tensor:
    """Send rows to other ranks, and get theirs, at one byte per element and one scale per tile in one direction.

    A dispatch sends x in float8, in the format of the recipe's x, and its gradient in x's dtype. A combine sends x in
    its dtype, and its gradient in the format of the recipe's dy. What arrives is in x's dtype, which holds the values
    of the codes exactly. Experts of the same recipe cast these to the same values again: y and dx are bitwise those of
    tokens that were sent as they are. dw reads tokens by columns, whose scales are others: an element differs where it
    is subnormal under the scale of its row or its column.

    Args:
        x: (M, K), in float32, bfloat16 or float16.
        output_splits: rows from each rank of the group.
        input_splits: rows of x for each rank, M in all.
        group: the ranks; None for all of the job.
        recipe: one whose x and dy have powers of two as scales, each of a row or a part of it.
        combine: see above.

    Returns:
        (sum of ``output_splits``, K), in x's dtype.

    Raises:
        Float8ConfigError: a recipe whose tiles are of several rows, or whose scales are not powers of two.
        Float8ShapeError: x is no matrix of the rows that ``input_splits`` count.
    """
    # A recipe's file is not looked for while code is traced.
    how = _format_named if isinstance(recipe, str) else _format_of
    format = how(recipe, combine)
    # While code is traced, numbers of rows are not known.
    is_off = not torch.compiler.is_compiling() and x.shape[:1] != (sum(input_splits),)
    if x.dim() != 2 or is_off or x.dtype not in HIGH_PRECISION:
        raise Float8ShapeError(
            f"tokens are exchanged as rows of a matrix in high precision, {sum(input_splits)} by input_splits, got "
            f"{tuple(x.shape)} of {x.dtype}"
        )
    # Numbers of numpy and of tensors, too, which torch's operator refuses. Traced ones stay what they are.
    counted = list if torch.compiler.is_compiling() else _whole
    splits = counted(output_splits), counted(input_splits)
    y: torch.Tensor = apply(_Exchange, x, splits, group or dist.group.WORLD, format, combine)
    return y


def _whole(splits: Sequence[int]) -> list[int]:
    return [int(rows) for rows in splits]


def _format_of(recipe: Recipe | str, combine: bool) -> str:
    return wire_format(get_recipe(recipe), combine=combine).name


@constant_result
def _format_named(recipe: Recipe | str, combine: bool) -> str:
    return _format_of(recipe, combine)


def wire_format(recipe: Recipe, *, combine: bool) -> Float8Format:
    """The format of what crosses in float8: of a dispatch x, of a combine dy."""
    format = recipe.dgrad.a if combine else recipe.fprop.a
    # With powers of two the experts cast what arrives to the same values again.
    if format is None or not format.is_plain or format.tile.rows != 1 or not format.scale_rule.is_power_of_2:
        raise Float8ConfigError(
            f"recipe {recipe.name!r} casts {'dy' if combine else 'x'} to {format}; tokens cross in codes of a byte "
            "with a power of two for each row or part of a row, as rowwise and blockwise have"
        )
    return format


def refuse_other_wires(recipe: Recipe) -> None:
    """Refuse a recipe whose tokens cannot cross in float8, in either direction."""
    for combine in (False, True):
        wire_format(recipe, combine=combine)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        splits: tuple[list[int], list[int]],
        group: dist.ProcessGroup,
        format: str,
        combine: bool,
    ) -> torch.Tensor:
        ctx.how = splits, group, format, combine
        return rows_over_ranks(x, *splits, group) if combine else _in_float8(x, *splits, group, format)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_twice()
        splits, group, format, combine = ctx.how
        # The gradient goes the other way: what was received is sent.
        received, sent = splits
        dx = (
            _in_float8(dy, sent, received, group, format)
            if combine
            else rows_over_ranks(dy, sent, received, group)
        )
        return dx, None, None, None, None


def _in_float8(
    x: torch.Tensor,
    output_splits: list[int],
    input_splits: list[int],
    group: dist.ProcessGroup,
    format: str,
) -> torch.Tensor:
    """One all-to-all of bytes: a row's codes, and its scales behind them."""
    received = rows_over_ranks(rows_as_bytes(x, format), output_splits, input_splits, group)
    rows: torch.Tensor = rows_of_bytes(received, x.shape[1], format, x.dtype)
    return rows


_SEAMS = {"_dispatch_token_exchange": False, "_combine_token_exchange": True}
"""Methods of torchtitan 0.3's ``AllToAllTokenDispatcher`` that exchange tokens, and whether they combine."""

_SUPPORTED = (
    "f8sub knows torchtitan's AllToAllTokenDispatcher, its comm_backend 'standard', and classes that extend it, such "
    "as TorchAOTokenDispatcher, and MinimalAsyncEPTokenDispatcher, its 'minimal_async_ep'; your own code calls "
    "f8sub.exchange_tokens where it exchanges tokens"
)


def dispatch_tokens_in_float8(model: torch.nn.Module, recipe: Recipe | str) -> int:
    """Have the dispatchers of a torchtitan model send tokens and dy at one byte per element.

    Off unless it is called. See ``exchange_tokens`` for what is rounded. Known are ``AllToAllTokenDispatcher`` of
    torchtitan 0.3 and classes that extend it, such as ``TorchAOTokenDispatcher``; and its
    ``MinimalAsyncEPTokenDispatcher``, whose rows become shorter. DeepEP and HybridEP send by kernels of their own.

    Args:
        model: with modules that have dispatchers of torchtitan 0.3.
        recipe: that of the experts, as ``exchange_tokens`` takes it.

    Returns:
        How many dispatchers there are.

    Raises:
        Float8ConfigError: there is none, or one that sends tokens by kernels of its own, or the recipe cannot be.
    """
    found = get_recipe(recipe)
    refuse_other_than_a_module("dispatch_tokens_in_float8", model)
    # An unfit recipe is refused before any dispatcher is changed.
    refuse_other_wires(found)
    # By identity, because modules may share a dispatcher.
    dispatchers = {
        id(value): (value, f"{fqn}.{name}".lstrip("."))
        for fqn, module in model.named_modules()
        for name, value in vars(module).items()
        if _is_dispatcher(value)
    }
    _refuse_others(dispatchers.values())
    for dispatcher, _ in dispatchers.values():
        if _is_async(dispatcher):
            _send_in_float8(dispatcher, *(wire_format(found, combine=combine) for combine in (False, True)))
            continue
        for name, combine in _SEAMS.items():
            setattr(dispatcher, name, functools.partial(_exchange, found, combine))
    return len(dispatchers)


def _is_dispatcher(value: Any) -> bool:
    """Return whether an attribute of a module dispatches tokens, by torchtitan's names of methods."""
    return all(callable(getattr(value, name, None)) for name in ("dispatch", "combine", "wire_meshes"))


def _refuse_others(dispatchers: Collection[tuple[Any, str]]) -> None:
    """Refuse a model without dispatchers, and dispatchers whose exchanges f8sub cannot replace."""
    if not dispatchers:
        raise Float8ConfigError(
            f"no module of the model has a dispatcher of tokens of torchtitan; {_SUPPORTED}"
        )
    for dispatcher, fqn in dispatchers:
        if _is_async(dispatcher):
            _refuse_other_version(fqn)
        elif not all(callable(getattr(dispatcher, name, None)) for name in _SEAMS):
            # torchtitan's dispatcher for one rank has no mesh.
            is_local = not hasattr(dispatcher, "ep_mesh")
            what = "sends no tokens to other ranks" if is_local else "sends tokens by kernels of its own"
            raise Float8ConfigError(f"{fqn}, a {type(dispatcher).__name__}, {what}; {_SUPPORTED}")


def _exchange(
    recipe: Recipe,
    combine: bool,
    tokens: torch.Tensor,
    pg: dist.ProcessGroup,
    received: list[int],
    sent: list[int],
) -> torch.Tensor:
    return exchange_tokens(tokens, received, sent, pg, recipe=recipe, combine=combine)


_API, _KERNELS = (f"torchtitan.distributed.minimal_async_ep.{name}" for name in ("api", "kernels"))
_DISPATCHERS = "torchtitan.models.common.token_dispatcher"

_SEND = "_dispatch_to_experts"

_KNOWN = {
    (_API, _SEND): "x_ND dispatch_dst_ranks dispatch_dst_rows num_routed_rows",
    (_API, "MinimalAsyncEPDispatchMetadata"): "dispatch_dst_ranks dispatch_dst_rows combine_dst_ranks "
    "combine_dst_rows combine_num_valid_rows E_row_to_T_row T_row_to_E_row routed_scores num_tokens top_k",
    (_KERNELS, "expand_topk_grad_kernel"): "grad_out flat_indices scores top_k dtype scores_are_slot_ordered",
    (
        _KERNELS,
        "topk_scores_grad_kernel",
    ): "routed_output grad_out flat_indices top_k dtype scores_are_slot_ordered",
    (_DISPATCHERS, "EPDispatchMetadata"): "state",
}
"""Functions and classes of torchtitan 0.3.0 that are called here, and the names of their arguments."""

_KNOWN_OPERATORS = {
    "dispatch": "dispatch_input topk_expert_ids_TK num_local_tokens_per_expert_E receive_capacity ep_size",
    "combine": "x dispatch_dst_ranks dispatch_dst_rows combine_dst_ranks combine_dst_rows combine_num_valid_rows "
    "T_row_to_E_row_N E_row_to_T_row_N routed_scores_N num_tokens top_k",
    "dispatch_backward": "grad_hidden combine_dst_ranks combine_dst_rows combine_num_valid_rows T_row_to_E_row_N "
    "num_routed_rows num_tokens top_k",
}
"""The same of its operators."""

ALIGNMENT = 16
"""Rows of bytes have multiples of so many, which torchtitan's kernel copies at once."""


def _is_async(dispatcher: Any) -> bool:
    """Return whether a dispatcher is torchtitan's for MinimalAsyncEP, or extends it."""
    return any(cls.__name__ == "MinimalAsyncEPTokenDispatcher" for cls in type(dispatcher).__mro__)


def _refuse_other_version(fqn: str) -> None:
    """Refuse a torchtitan whose functions have other arguments than those known here.

    Raises:
        Float8ConfigError: it has.
    """
    found = {f"{m}.{name}": getattr(importlib.import_module(m), name, None) for m, name in _KNOWN}
    operators = torch.ops.minimal_async_ep
    found |= {name: getattr(getattr(operators, name, None), "default", None) for name in _KNOWN_OPERATORS}
    for (name, each), arguments in zip(
        found.items(), [*_KNOWN.values(), *_KNOWN_OPERATORS.values()], strict=True
    ):
        takes = [] if each is None else list(parameters_of(each))
        if takes != arguments.split():
            raise Float8ConfigError(
                f"{fqn}: {name} of this torchtitan takes {takes}; f8sub knows that of torchtitan 0.3.0, with "
                f"{arguments.split()}"
            )


def _send_in_float8(dispatcher: Any, x: Float8Format, dy: Float8Format) -> None:
    """Have a dispatcher of MinimalAsyncEP send tokens in the format of x, and gradients of results in that of dy.

    torchtitan's own operators move rows of any width, so rows of codes and scales travel as narrower rows of its dtype,
    by the same exchanges in the same order. What comes back, and the gradients of tokens, move as they are.
    """
    # Looked up once, because compiled code imports nothing.
    makes = (
        importlib.import_module(_API).MinimalAsyncEPDispatchMetadata,
        importlib.import_module(_DISPATCHERS).EPDispatchMetadata,
    )
    dispatcher.dispatch = functools.partial(_dispatch, dispatcher, x.name, makes)
    dispatcher.combine = functools.partial(_combine, dy.name)


def _dispatch(
    dispatcher: Any,
    format: str,
    makes: tuple[Any, Any],
    x: torch.Tensor,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """``MinimalAsyncEPTokenDispatcher.dispatch``, with the classes of its results."""
    make_state, make = makes
    ranks = dispatcher.ep_mesh.size()
    capacity = ranks * x.shape[0] * min(dispatcher.top_k, counts.numel() // ranks)
    routed, *places, per_expert = apply(_Dispatch, x, chosen, counts, capacity, ranks, format)
    to_ranks, to_rows, from_ranks, from_rows, valid, by_token, by_expert = places
    state = make_state(
        dispatch_dst_ranks=to_ranks,
        dispatch_dst_rows=to_rows,
        combine_dst_ranks=from_ranks,
        combine_dst_rows=from_rows,
        combine_num_valid_rows=valid,
        E_row_to_T_row=by_token,
        T_row_to_E_row=by_expert,
        routed_scores=scores.view(-1),
        num_tokens=x.shape[0],
        top_k=dispatcher.top_k,
    )
    return routed, per_expert, make(state=state)


def _combine(format: str, y: torch.Tensor, metadata: Any, x: torch.Tensor) -> torch.Tensor:
    """``MinimalAsyncEPTokenDispatcher.combine``."""
    state = metadata.state
    places = (
        state.dispatch_dst_ranks,
        state.dispatch_dst_rows,
        state.combine_dst_ranks,
        state.combine_dst_rows,
        state.combine_num_valid_rows,
        state.T_row_to_E_row,
        state.E_row_to_T_row,
    )
    found: torch.Tensor = apply(
        _Combine, y, state.routed_scores, *places, state.num_tokens, state.top_k, format
    )
    return found


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        chosen: torch.Tensor,
        counts: torch.Tensor,
        capacity: int,
        ranks: int,
        format: str,
    ) -> tuple[torch.Tensor, ...]:
        found = _send_tokens(x, chosen, counts, capacity, ranks, format)
        _, _, _, from_ranks, from_rows, valid, _, by_expert, _ = found
        ctx.save_for_backward(from_ranks, from_rows, valid, by_expert)
        ctx.how = chosen.numel(), x.shape[0], chosen.shape[1]
        ctx.mark_non_differentiable(*found[1:])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        refuse_twice()
        found = torch.ops.minimal_async_ep.dispatch_backward(dx, *ctx.saved_tensors, *ctx.how)
        return found, None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913  (what torchtitan's operator takes)
        ctx: Any,
        y: torch.Tensor,
        scores: torch.Tensor,
        to_ranks: torch.Tensor,
        to_rows: torch.Tensor,
        from_ranks: torch.Tensor,
        from_rows: torch.Tensor,
        valid: torch.Tensor,
        by_expert: torch.Tensor,
        by_token: torch.Tensor,
        tokens: int,
        top_k: int,
        format: str,
    ) -> torch.Tensor:
        places = to_ranks, to_rows, from_ranks, from_rows, valid, by_expert, by_token
        combined, routed = torch.ops.minimal_async_ep.combine(y, *places, scores, tokens, top_k)
        ctx.save_for_backward(to_ranks, to_rows, by_token, scores, routed, valid)
        ctx.how = top_k, y.shape[0], format
        found: torch.Tensor = combined
        return found

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_twice()
        dy, d_scores = _send_gradients(dy.contiguous(), *ctx.saved_tensors, *ctx.how)
        return dy, d_scores, *[None] * 10


def _packed(x: torch.Tensor, format: str) -> torch.Tensor:
    """Rows of bytes, in the dtype that torchtitan moves."""
    rows = rows_as_bytes(x, format)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % ALIGNMENT))
    if rows.shape[1] > x.shape[1] * x.element_size():
        raise Float8ConfigError(
            f"tokens of {x.shape[1]} elements in {x.dtype} are no longer than their codes and scales, "
            f"{rows.shape[1]} bytes; leave dispatch_tokens_in_float8 out"
        )
    return rows.view(x.dtype)


def _unpacked(
    received: torch.Tensor, like: torch.Tensor, capacity: int, format: str, valid: torch.Tensor
) -> torch.Tensor:
    # Read before another exchange writes there, and no longer needed then.
    rows = received[:capacity].view(torch.uint8)
    return of_bytes(rows, like.shape[1], format, like.dtype, valid)


def _tokens_sent(
    x: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor, capacity: int, ranks: int, format: str
) -> list[torch.Tensor]:
    received, *places = torch.ops.minimal_async_ep.dispatch(
        _packed(x, format), chosen, counts, capacity, ranks
    )
    return [_unpacked(received, x, capacity, format, places[4]), *places]


def _fake_sent(
    x: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor, capacity: int, ranks: int, format: str
) -> list[torch.Tensor]:
    rows = chosen.numel()
    sizes = rows, rows, capacity, capacity, 1, rows, rows, counts.shape[0] // ranks
    places = [chosen.new_empty(size, dtype=torch.int64) for size in sizes]
    return [x.new_empty((capacity, x.shape[1])), *places]


def _gradients_sent(  # noqa: PLR0913  (what torchtitan's operator takes)
    dy: torch.Tensor,
    to_ranks: torch.Tensor,
    to_rows: torch.Tensor,
    by_token: torch.Tensor,
    scores: torch.Tensor,
    routed: torch.Tensor,
    valid: torch.Tensor,
    top_k: int,
    capacity: int,
    format: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    kernels = importlib.import_module(_KERNELS)
    how = {"top_k": top_k, "scores_are_slot_ordered": True}
    expanded = kernels.expand_topk_grad_kernel(dy, by_token, scores, dtype=dy.dtype, **how)
    # Before anything is received: what was combined may lie where the next rows come.
    d_scores = kernels.topk_scores_grad_kernel(routed, dy, by_token, dtype=scores.dtype, **how)
    received = getattr(importlib.import_module(_API), _SEND)(
        _packed(expanded, format), to_ranks, to_rows, by_token.numel()
    )
    return _unpacked(received, dy, capacity, format, valid), d_scores


def _fake_gradients(
    dy: torch.Tensor, to_ranks: Any, to_rows: Any, by_token: Any, scores: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *_, capacity, _ = others
    return dy.new_empty((capacity, dy.shape[1])), torch.empty_like(scores)


_send_tokens = operator(_tokens_sent, "send_tokens", _fake_sent)
_send_gradients = operator(_gradients_sent, "send_gradients", _fake_gradients)
