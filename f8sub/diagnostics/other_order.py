"""Linear layers whose sums run in another order: as exact as before, so what changes is the noise of the dtype."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OtherOrder(TorchFunctionMode):
    """Permutes rows, columns and features around ``F.linear``, so that all three GEMMs add in another order.

    On paper nothing changes. In bfloat16 the loss moves as far as another kernel or another GPU would move it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch; ``F.linear`` on permuted operands."""
        if func is not torch.nn.functional.linear:
            return func(*args, **(kwargs or {}))
        return _permuted(*args, **(kwargs or {}))


def _permuted(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    x = input.reshape(-1, input.shape[-1])
    rows, features, columns = (_order(size, x.device) for size in (*x.shape, weight.shape[0]))
    y = torch.nn.functional.linear(x[rows][:, features], weight[columns][:, features])
    y = y[rows.argsort()][:, columns.argsort()]
    y = y if bias is None else y + bias.to(y.dtype)
    return y.view(*input.shape[:-1], weight.shape[0])


def _order(size: int, device: torch.device) -> torch.Tensor:
    """The same permutation whenever it is asked for, without a draw from torch's global generators."""
    generator = torch.Generator("cpu").manual_seed(size)
    return torch.randperm(size, generator=generator, dtype=torch.int64, device="cpu").to(device)
