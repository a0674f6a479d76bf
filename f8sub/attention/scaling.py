"""The scales of attention in float8: which follow from the current q, k, v and dO, and which from earlier backwards.

[Note] cuDNN's kernels on Hopper write o, dq, dk and dv as float8, so their scales are needed before there is anything
to take an amax of. The same is true of the probabilities s and of dP, which never leave the kernel. Forward needs no
past: a probability is 1 at most, and a row of o is a mean of rows of v. So the scale of s is a constant and that of o
follows from the scale of v, both as safe as a current amax. In backward a column of probabilities may sum up to
anything between 0 and the number of rows, and bounds are too loose to be scales. There the amaxes of earlier
backwards count, twice as large as they were: an amax that is 256 times too large costs nothing, one that is half as
large as it should be saturates. The kernels report the amaxes of what they made before it was rounded, so a gradient
that was saturated is noticed, and counted without waiting.

Where there is no past, the bounds serve once: what saturates nowhere has amaxes that are right, and backward runs again
with them.
"""

from typing import NamedTuple

import torch

from f8sub.attention.problem import E4M3, Problem

GRADIENTS = ("dP", "dq", "dk", "dv")
"""The columns of histories and of saturations."""

HISTORY = 16
"""Backwards that a history remembers."""

MARGIN = 2.0
"""How much larger than the largest remembered amax the next one is taken to be."""

OF_1 = E4M3.max
"""The scale of probabilities: the largest of them, 1, becomes the largest e4m3. Rounded, none exceeds it."""

HEADROOM = 0.9375
"""What the scale of o is of v's. Each probability is rounded up by 1/16 of itself at most, and so is their mean of v;
15/16 times 17/16 is less than 1."""

LARGEST = 2.0**100
"""No scale is larger, so that every inverse is a normal float32."""

Q, K, V, O = range(4)  # noqa: E741  (as the tensors are called)
"""Where their inverse scales are in ``ForwardScales.inverse``."""


class ForwardScales(NamedTuple):
    """The scales of one forward.

    Attributes:
        inverse: float32, (4,): of q, k, v and o.
        of_o: float32, (1,).
        of_s: float32, (2,): scale and inverse scale of probabilities.
    """

    inverse: torch.Tensor
    of_o: torch.Tensor
    of_s: torch.Tensor


class BackwardScales(NamedTuple):
    """The scales of one backward, float32.

    Attributes:
        gradients: (4,), of ``GRADIENTS``.
        inverse: (4,), the inverse scales of these.
        of_s: (2,), see ``ForwardScales``.
    """

    gradients: torch.Tensor
    inverse: torch.Tensor
    of_s: torch.Tensor


def forward_scales(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> ForwardScales:
    """Return the scales of a forward, from the inverse scales of q, k and v, float32, (1, 1) each."""
    # o is a mean of rows of v, so its scale is v's, with room for probabilities that were rounded up.
    inverse = torch.cat([q.view(1), k.view(1), v.view(1), v.view(1) / HEADROOM])
    return ForwardScales(inverse, inverse[O:].reciprocal(), _of_s(v))


def _of_s(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([OF_1, 1.0 / OF_1], dtype=torch.float32, device=x.device)


def factors_of_bounds(problem: Problem) -> tuple[float, float]:
    """Return what times the amaxes of dO and v bounds dP, and what a sum over all rows that read a column has terms.

    ``|dP| <= scale * p * (|dO . v| + |dO . o|)``, each product of rows at most width times both amaxes.
    """
    return 2.0 * problem.width * problem.scale, float(problem.rows * problem.group)


def backward_scales(
    problem: Problem,
    inverse: torch.Tensor,
    inverse_do: torch.Tensor,
    history: torch.Tensor,
    top: float,
) -> BackwardScales:
    """Return the scales of a backward: of the amaxes that are remembered, or of bounds where there are none.

    Args:
        problem: the call.
        inverse: ``ForwardScales.inverse``.
        inverse_do: float32, one element: the inverse scale of dO.
        history: float32, (backwards, 4): amaxes of ``GRADIENTS``, 0 where there is none yet.
        top: the largest number of dO's and dP's format.
    """
    of_dp, terms = factors_of_bounds(problem)
    # An amax is what its scale brings to the largest number.
    amax_q, amax_k, amax_v = (inverse[:3] * OF_1).unbind()
    amax_do = inverse_do.view(()) * top
    # |dO . v| and |dO . o| are at most width times both amaxes.
    dp = of_dp * amax_do * amax_v
    # The rows of P sum up to 1, so dq is at most a mean; dk and dv are sums over all rows.
    bounds = torch.stack([dp, dp * amax_k, terms * dp * amax_q, terms * amax_do])
    remembered = history.amax(0) * MARGIN
    amax = torch.where(remembered > 0, remembered, bounds)
    largest = torch.full_like(amax, OF_1)
    largest[0] = top
    # All zero, it takes any scale; NaN has none, and shows.
    scale = torch.where(amax != 0, (largest / amax).clamp(max=LARGEST), 1.0)
    return BackwardScales(scale, scale.reciprocal(), _of_s(history))


def with_measured(history: torch.Tensor, amaxes: torch.Tensor) -> torch.Tensor:
    """Return a history, one row longer: amaxes that were just measured, where nothing is remembered; new memory."""
    return torch.cat([history, torch.where(history.amax(0) > 0, 0.0, amaxes)[None]])


def roll(
    history: torch.Tensor, saturated: torch.Tensor, amaxes: torch.Tensor, scales: torch.Tensor, top: float
) -> None:
    """Remember a backward's amaxes (4,) in place of the oldest, and count those that its scales (4,) did not hold.

    An amax that is not finite is not remembered: gradients that overflowed say nothing of the next ones.
    """
    # dP has the format of dO, the others e4m3.
    largest = torch.full_like(amaxes, OF_1)
    largest[0] = top
    saturated += (amaxes * scales > largest).float()
    # In place, as captured graphs and state dicts know the tensors.
    newest = torch.where(amaxes.isfinite(), amaxes, 0.0)
    history.copy_(torch.cat([newest[None], history[:-1]]))
