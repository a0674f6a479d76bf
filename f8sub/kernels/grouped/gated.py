"""SwiGLU between two products of experts, cast without a pass of its own: what its values are, in plain PyTorch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

RESULT, BOTH, EACH, GATE, UP = "result", "both", "each", "gate", "up"
"""What is cast: SwiGLU's result; gradients of gate and up side by side, as one weight makes them; as two matrices, up's
below gate's; or one of these."""


class Gated(NamedTuple):
    """SwiGLU's result, or the gradient of its input, that is computed where it is cast.

    Each operator's result is rounded to the dtype of its inputs, as PyTorch's eager operators round.

    Attributes:
        gate: (M, N), in high precision, whose rows may lie in a wider matrix.
        up: (M, N), in rows of the same stride.
        dh: (M, N), the gradient of the result, contiguous; None for ``RESULT``.
        side: ``RESULT``, ``GATE`` or ``UP``, (M, N), ``BOTH``, (M, 2 N), or ``EACH``, two of (M, N).
    """

    gate: torch.Tensor
    up: torch.Tensor
    dh: torch.Tensor | None = None
    side: str = RESULT

    @property
    def matrices(self) -> int:
        """Matrices that are cast, each with scales of its own."""
        return 2 if self.side == EACH else 1

    @property
    def width(self) -> int:
        """Columns of each."""
        width = self.gate.shape[1]
        return 2 * width if self.side == BOTH else width

    @property
    def nbytes(self) -> int:
        """Bytes of all that is read for what is cast."""
        read = 2 if self.side in (RESULT, UP) else 3
        return read * self.gate.numel() * self.gate.itemsize

    def empty(self) -> torch.Tensor:
        """A tensor that has the shape, dtype and device of each matrix, and no memory to speak of."""
        return self.gate.new_empty(1).expand(self.gate.shape[0], self.width)

    def values(self) -> torch.Tensor:
        """What is cast, (M, width), as PyTorch computes it; of one matrix."""
        if self.dh is None:
            return F.silu(self.gate) * self.up
        parts = []
        if self.side != UP:
            parts.append(torch.ops.aten.silu_backward(self.dh * self.up, self.gate))
        if self.side != GATE:
            parts.append(self.dh * F.silu(self.gate))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def each(self) -> "tuple[Gated, Gated]":
        """The two matrices of ``EACH``."""
        return self._replace(side=GATE), self._replace(side=UP)
