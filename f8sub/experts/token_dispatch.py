"""exchange_tokens: an all-to-all of rows, in float8 in one direction and as they are in the other, differentiated.

Source: DeepSeek-V3 (arXiv 2412.19437, 3.3), which dispatches in float8 and combines in bfloat16.

torchtitan's dispatchers of tokens then exchange tokens in float8.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from f8sub.errors import Float8ConfigError, Float8ShapeError, refuse_other_than_a_module
from f8sub.experts.async_dispatch import is_async, refuse_other_version, send_in_float8
from f8sub.formats import HIGH_PRECISION, Float8Format
from f8sub.kernels.row_bytes import rows_as_bytes, rows_of_bytes
from f8sub.recipe import Recipe, get_recipe
from f8sub.torch_compat import apply, constant_result


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
    is_off = not torch.compiler.is_compiling() and x.shape[0] != sum(input_splits)
    if x.dim() != 2 or is_off or x.dtype not in HIGH_PRECISION:
        raise Float8ShapeError(
            f"tokens are exchanged as rows of a matrix in high precision, {sum(input_splits)} by input_splits, got "
            f"{tuple(x.shape)} of {x.dtype}"
        )
    splits = list(output_splits), list(input_splits)
    y: torch.Tensor = apply(_Exchange, x, splits, group or dist.group.WORLD, format, combine)
    return y


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
        return _all_to_all(x, *splits, group) if combine else _in_float8(x, *splits, group, format)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        splits, group, format, combine = ctx.how
        # The gradient goes the other way: what was received is sent.
        received, sent = splits
        dx = (
            _in_float8(dy, sent, received, group, format)
            if combine
            else _all_to_all(dy, sent, received, group)
        )
        return dx, None, None, None, None


def _all_to_all(
    x: torch.Tensor, output_splits: list[int], input_splits: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    received = x.new_empty((sum(output_splits), x.shape[1]))
    dist.all_to_all_single(received, x.contiguous(), output_splits, input_splits, group)
    return received


def _in_float8(
    x: torch.Tensor,
    output_splits: list[int],
    input_splits: list[int],
    group: dist.ProcessGroup,
    format: str,
) -> torch.Tensor:
    """One all-to-all of bytes: a row's codes, and its scales behind them."""
    received = _all_to_all(rows_as_bytes(x, format), output_splits, input_splits, group)
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
        if is_async(dispatcher):
            send_in_float8(dispatcher, *(wire_format(found, combine=combine) for combine in (False, True)))
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
        if is_async(dispatcher):
            refuse_other_version(fqn)
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
