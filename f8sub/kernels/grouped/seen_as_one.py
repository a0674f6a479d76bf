"""A product of experts that selective checkpointing sees as ``aten._grouped_mm``, which lists for bf16 have.

What runs it may be several operators, or kernels that no dispatch mode sees. Other modes look into it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import grouped_mm

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
    if not dispatch_stack_size() or not any(map(_is_of_checkpointing, dispatch_modes())):
        return run()
    left, right = _Factor(rows.shape, rows), _Factor(weight.transpose(1, 2).shape, weight)
    left.run = run
    device = rows.device.type
    if autocast_dtype(device) is None:
        return grouped_mm(left, right, offs=ends)
    with torch.autocast(device, enabled=False):
        return grouped_mm(left, right, offs=ends)


def _is_of_checkpointing(mode: Any) -> bool:
    return type(mode).__module__ == "torch.utils.checkpoint"
