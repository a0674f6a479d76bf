"""Tokens that are sent to experts, which lie in their own order: how rows of groups are read, and put back."""

from typing import NamedTuple

import torch


class Sent(NamedTuple):
    """Where the rows of groups come from, and what their results count.

    A choice is one of the ``top_k`` experts of a token. All of them are numbered token by token, and a row is one of
    them. Those of experts that are on other ranks are past the last group.

    Attributes:
        order: int64, (M,): the choice that each row is.
        back: int64, (M,): the row that each choice is.
        weights: (T, top_k), in high precision: the factor of the result of each choice.
    """

    order: torch.Tensor
    back: torch.Tensor
    weights: torch.Tensor

    @property
    def tokens(self) -> torch.Tensor:
        """int64, (M,): the token that each row is."""
        return self.order // self.weights.shape[1]

    @property
    def factors(self) -> torch.Tensor:
        """(M,): the weight of each row."""
        return self.weights.flatten()[self.order]

    def by_token(self, y: torch.Tensor) -> torch.Tensor:
        """Put rows, (M, N), back in the order of the choices: (T, top_k, N).

        Each is read from its place: adding by index would need a sort, or atomics in another order each time.
        """
        return y[self.back].view(*self.weights.shape, y.shape[1])

    def combined(self, placed: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Each token's results, (T, top_k, N) by ``by_token``, times their weights, added up: (T, N).

        Results of other ranks' experts are zeros, and so are their weights taken to be, whatever they are.
        """
        weights = torch.where(self._is_here(ends), self.weights, 0)
        # Put back first: ``index_add_`` adds in another order at each call on a GPU.
        return (placed * weights[:, :, None]).sum(1)

    def gradient_of_weights(self, placed: torch.Tensor, dy: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The gradient of ``weights``, of ``combined``'s arguments and ``dy``, (T, N), its result's."""
        found = (dy.to(self.dtype_with(placed.dtype))[:, None] * placed).sum(2)
        return torch.where(self._is_here(ends), found, 0).to(self.weights.dtype)

    def dtype_with(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of results of ``dtype`` times their weights."""
        return torch.promote_types(dtype, self.weights.dtype)

    def _is_here(self, ends: torch.Tensor) -> torch.Tensor:
        return (self.back < ends[-1]).view(self.weights.shape)
