"""Products of experts as they are called: in compiled code each is one node of the graph.

``torch.compile`` must not look into them: backends read where groups lie, or launch kernels of their own; see
``kernels/ops.py``.

Selective checkpointing sees a product as ``aten._grouped_mm``, which lists for bf16 have. What runs it may be several
operators, or kernels that no dispatch mode sees. Other modes look into it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import grouped_mm

from f8sub.formats import Float8Format
from f8sub.kernels.gemm.select import GROUPED
from f8sub.kernels.grouped import gemm
from f8sub.kernels.grouped.gemm import GroupedBackend
from f8sub.kernels.grouped.operands import ExpertWeights, Groups, Tokens
from f8sub.kernels.ops import operator
from f8sub.recipe import GemmSpec
from f8sub.torch_compat import autocast_dtype, dispatch_modes, dispatch_stack_size, no_torch_function


class _Factor(torch.Tensor):
    """One side of a product: a shape, and on the left what multiplies; it lives for one call."""

    __torch_function__ = no_torch_function

    run: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(cls: type["_Factor"], shape: torch.Size, like: torch.Tensor) -> "_Factor":
        made: _Factor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bfloat16, device=like.device
        )
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name() != "aten::_grouped_mm":
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        return args[0].run()


def seen_as_one(
    run: Callable[[], torch.Tensor], rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """``run()``, one operator to selective checkpointing.

    Args:
        run: multiplies.
        rows: (M, K), or codes of it.
        weight: (E, N, K), or codes of it.
        ends: as of ``grouped_mm``.
    """
    # Most calls are under no mode, and other modes may look into the product.
    if not dispatch_stack_size() or not any(map(_is_of_checkpointing, dispatch_modes())):
        return run()
    left, right = _Factor(rows.shape, rows), _Factor(weight.transpose(1, 2).shape, weight)
    left.run = run
    device = rows.device.type
    if autocast_dtype(device) is None:
        return grouped_mm(left, right, offs=ends)
    # Autocast would cast the factors, which hold no values.
    with torch.autocast(device, enabled=False):
        return grouped_mm(left, right, offs=ends)


def _is_of_checkpointing(mode: Any) -> bool:
    return type(mode).__module__ == "torch.utils.checkpoint"


def rows(
    backend: str | None,
    spec: GemmSpec,
    a: Tokens,
    b: ExpertWeights,
    groups: Groups,
    dtype: torch.dtype,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """``GroupedBackend.rows`` of the backend of that name; plus ``added``, of the result's shape and dtype."""
    own = _backend(backend, spec)
    if not torch.compiler.is_compiling():
        multiply = functools.partial(_multiplied, own, a, b, groups, dtype, spec.fast_accum, added)
        return seen_as_one(multiply, a.data, b.data, groups.ends)
    found: torch.Tensor = rows_as_one_node(
        *_packed(backend, a, b, [*a.groups[:2]], groups), dtype, spec.fast_accum, added
    )
    return found


def _multiplied(
    backend: GroupedBackend,
    a: Tokens,
    b: ExpertWeights,
    groups: Groups,
    dtype: torch.dtype,
    fast_accum: bool,
    added: torch.Tensor | None,
) -> torch.Tensor:
    if added is not None and backend.adds:
        return backend.rows(a, b, groups, dtype, fast_accum, added.contiguous())
    y = backend.rows(a, b, groups, dtype, fast_accum)
    return y if added is None else y + added


def weights(
    backend: str | None, spec: GemmSpec, a: Tokens, b: Tokens, groups: Groups, dtype: torch.dtype
) -> torch.Tensor:
    """``GroupedBackend.weights`` of the backend of that name."""
    own = _backend(backend, spec)
    if not torch.compiler.is_compiling():
        return own.weights(a, b, groups, dtype, spec.fast_accum)
    lie = [*a.groups[:2], *b.groups[:2]]
    found: torch.Tensor = _weights_as_one_node(*_packed(backend, a, b, lie, groups), dtype, spec.fast_accum)
    return found


def _backend(name: str | None, spec: GemmSpec) -> GroupedBackend:
    if name is None:
        raise RuntimeError(f"no backend for {spec}, both operands of which are in float8")
    return GROUPED[name]


def _packed(
    backend: str | None, a: Tokens, b: Tokens | ExpertWeights, lie: list[torch.Tensor], groups: Groups
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], int, str]:
    """Return what an operator takes: groups, in operands and in the result, as tensors, and formats by name."""
    how = f"{a.format.name} {b.format.name} {backend}"
    return [a.data, a.scale_inv], [b.data, b.scale_inv], [*lie, groups.first, groups.ends], groups.rows, how


def high_precision_rows(x: torch.Tensor, w: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``gemm.high_precision_rows``."""
    if not torch.compiler.is_compiling():
        multiply = functools.partial(gemm.high_precision_rows, x, w, groups)
        return seen_as_one(multiply, x, w, groups.ends)
    found: torch.Tensor = plain_rows_as_one_node(x, w, groups.first, groups.ends)
    return found


def high_precision_weights(dy: torch.Tensor, x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``gemm.high_precision_weights``."""
    if not torch.compiler.is_compiling():
        return gemm.high_precision_weights(dy, x, groups)
    found: torch.Tensor = _plain_weights_as_one_node(dy, x, groups.first, groups.ends)
    return found


def _rows(  # noqa: PLR0913  (an operator has no structures)
    a: list[torch.Tensor],
    b: list[torch.Tensor],
    lie: list[torch.Tensor],
    rows: int,
    how: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply ``a`` and ``b``, each codes and scales.

    ``lie`` is the first rows and ends of groups in a, and in y; ``how`` names two formats and the backend.
    """
    groups = Groups(lie[2], lie[3], rows)
    left, right, backend = how.split()
    tokens = Tokens(a[0], a[1], Float8Format.parse(left), Groups(lie[0], lie[1], a[0].shape[0]), False)
    experts = ExpertWeights(b[0], b[1], Float8Format.parse(right))
    # The fake's strides are the promise.
    return _multiplied(GROUPED[backend], tokens, experts, groups, out_dtype, fast_accum, added).contiguous()


def _fake_rows(a: list[torch.Tensor], b: list[torch.Tensor], *rest: Any) -> torch.Tensor:
    _, rows, _, out_dtype, *_ = rest
    return a[0].new_empty((rows, b[0].shape[1]), dtype=out_dtype)


def _weights(
    a: list[torch.Tensor],
    b: list[torch.Tensor],
    lie: list[torch.Tensor],
    rows: int,
    how: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """Multiply as ``_rows`` does; ``lie`` is the first rows and ends in a, in b, and in the tokens."""
    groups = Groups(lie[4], lie[5], rows)
    *formats, backend = how.split()
    left, right = (
        Tokens(codes, scale, Float8Format.parse(name), Groups(first, ends, codes.shape[1]), True)
        for (codes, scale), name, (first, ends) in zip((a, b), formats, (lie[:2], lie[2:4]), strict=True)
    )
    found = GROUPED[backend].weights(left, right, groups, out_dtype, fast_accum)
    return found.contiguous()


def _fake_weights(
    a: list[torch.Tensor], b: list[torch.Tensor], lie: list[torch.Tensor], *rest: Any
) -> torch.Tensor:
    _, _, out_dtype, _ = rest
    return a[0].new_empty((lie[0].shape[0], a[0].shape[0], b[0].shape[0]), dtype=out_dtype)


def _plain_rows(x: torch.Tensor, w: torch.Tensor, first: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return gemm.high_precision_rows(x, w, Groups(first, ends, x.shape[0])).contiguous()


def _plain_weights(
    dy: torch.Tensor, x: torch.Tensor, first: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    return gemm.high_precision_weights(dy, x, Groups(first, ends, dy.shape[0])).contiguous()


rows_as_one_node = operator(_rows, "grouped_rows", _fake_rows)
_weights_as_one_node = operator(_weights, "grouped_weights", _fake_weights)
plain_rows_as_one_node = operator(
    _plain_rows,
    "grouped_rows_in_high_precision",
    lambda x, w, first, ends: x.new_empty((x.shape[0], w.shape[1])),
)
_plain_weights_as_one_node = operator(
    _plain_weights,
    "grouped_weights_in_high_precision",
    lambda dy, x, first, ends: dy.new_empty((first.shape[0], dy.shape[1], x.shape[1])),
)
