"""torchtitan's MinimalAsyncEP with tokens in float8: rows are written to other ranks' memory as bytes.

torchtitan's own operators move rows of any width, so rows of codes and scales travel as narrower rows of its dtype, by
the same exchanges in the same order. What comes back, and the gradients of tokens, move as they are.
"""

import functools
import importlib
import inspect
from typing import Any

import torch

from f8sub.errors import Float8ConfigError
from f8sub.formats import Float8Format
from f8sub.kernels.ops import operator
from f8sub.kernels.row_bytes import of_bytes, rows_as_bytes
from f8sub.torch_compat import apply

_API, _KERNELS = (f"torchtitan.distributed.minimal_async_ep.{name}" for name in ("api", "kernels"))
_DISPATCHERS = "torchtitan.models.common.token_dispatcher"

_KNOWN = {
    (
        _API,
        "dispatch_op",
    ): "dispatch_input topk_expert_ids_TK num_local_tokens_per_expert_E receive_capacity ep_size",
    (_API, "combine_op"): "x dispatch_dst_ranks dispatch_dst_rows combine_dst_ranks combine_dst_rows "
    "combine_num_valid_rows T_row_to_E_row_N E_row_to_T_row_N routed_scores_N num_tokens top_k",
    (_API, "dispatch_backward_op"): "grad_hidden combine_dst_ranks combine_dst_rows combine_num_valid_rows "
    "T_row_to_E_row_N num_routed_rows num_tokens top_k",
    (_API, "_dispatch_to_experts"): "x_ND dispatch_dst_ranks dispatch_dst_rows num_routed_rows",
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

ALIGNMENT = 16
"""Rows of bytes have multiples of so many, which torchtitan's kernel copies at once."""


def is_async(dispatcher: Any) -> bool:
    """Return whether a dispatcher is torchtitan's for MinimalAsyncEP, or extends it."""
    return any(cls.__name__ == "MinimalAsyncEPTokenDispatcher" for cls in type(dispatcher).__mro__)


def refuse_other_version(fqn: str) -> None:
    """Refuse a torchtitan whose functions have other arguments than those known here.

    Raises:
        Float8ConfigError: it has.
    """
    for (module, name), arguments in _KNOWN.items():
        found = getattr(importlib.import_module(module), name, None)
        takes = [] if found is None else list(inspect.signature(getattr(found, "_init_fn", found)).parameters)
        if takes != arguments.split():
            raise Float8ConfigError(
                f"{fqn}: {module}.{name} of this torchtitan takes {takes}; f8sub knows that of torchtitan 0.3.0, "
                f"with {arguments.split()}"
            )


def send_in_float8(dispatcher: Any, x: Float8Format, dy: Float8Format) -> None:
    """Have a dispatcher send tokens in the format of x, and the gradients of their results in that of dy."""
    # Looked up once, because compiled code imports nothing.
    makes = _titans(_API).MinimalAsyncEPDispatchMetadata, _titans(_DISPATCHERS).EPDispatchMetadata
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
        dy, d_scores = _send_gradients(dy.contiguous(), *ctx.saved_tensors, *ctx.how)
        return dy, d_scores, *[None] * 10


def _titans(module: str) -> Any:
    return importlib.import_module(module)


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
    kernels = _titans(_KERNELS)
    how = {"top_k": top_k, "scores_are_slot_ordered": True}
    expanded = kernels.expand_topk_grad_kernel(dy, by_token, scores, dtype=dy.dtype, **how)
    # Before anything is received: what was combined may lie where the next rows come.
    d_scores = kernels.topk_scores_grad_kernel(routed, dy, by_token, dtype=scores.dtype, **how)
    received = _titans(_API)._dispatch_to_experts(
        _packed(expanded, format), to_ranks, to_rows, by_token.numel()
    )
    return _unpacked(received, dy, capacity, format, valid), d_scores


def _fake_gradients(  # noqa: PLR0913  (see above)
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
    return dy.new_empty((capacity, dy.shape[1])), torch.empty_like(scores)


_send_tokens = operator(_tokens_sent, "send_tokens", _fake_sent)
_send_gradients = operator(_gradients_sent, "send_gradients", _fake_gradients)
