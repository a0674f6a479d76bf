"""Errors of reduced gradients by the number of ranks: a ring in bfloat16, and e4m3 on the wire with float32 sums.

Every rank's gradient is a signal that all have and Gaussian noise of its own; the error is that of the mean. The ring
is emulated: each rank adds its own gradient in bfloat16 and rounds the sum. NCCL's trees and NVLink's sums round less
often. Two hops are of hosts with 8 ranks. 65,536 elements, one process.

    python scripts/tables/gradient_errors.py --write-docs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from f8sub.gradients.wire import decode, encode
from scripts.table import Table, finish, parser

ELEMENTS, LOCAL = 1 << 16, 8
RANKS = (2, 8, 64, 512)
SIGNALS = (0.1, 1.0)
"""Relative to a rank's own noise: the gradients of small batches have the first."""


def ring(gradients: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """Their sum over a ring of ranks in bfloat16, which rounds at every hop."""
    total = gradients[0].bfloat16()
    for gradient in gradients[1:]:
        total = (total.float() + gradient.bfloat16().float()).bfloat16()
    return total.float()


def one_hop(gradients: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(gradients.shape[1], dtype=torch.float32)
    for gradient in gradients:
        total += decode(*encode(gradient[None]))[0]
    return total


def two_hops(gradients: torch.Tensor) -> torch.Tensor:
    return one_hop(gradients.bfloat16().float().unflatten(0, (-1, min(LOCAL, len(gradients)))).sum(1))


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bf16 ring": ring,
    "e4m3, one hop": one_hop,
    "e4m3, two hops": two_hops,
}


def decibels(signal: float, ranks: int) -> dict[str, float]:
    """Of the mean, by how it is made."""
    rng = torch.Generator().manual_seed(ranks)
    gradients = torch.randn(ELEMENTS, generator=rng) * signal + torch.randn(ranks, ELEMENTS, generator=rng)
    exact = gradients.double().mean(0)
    found = {}
    for name, add in WAYS.items():
        error = (add(gradients).double() / ranks - exact).square().sum()
        found[name] = float(10 * torch.log10(exact.square().sum() / error))
    return found


def main() -> None:
    arguments = parser(__doc__, "gradient_errors").parse_args()
    figures = {f"{signal:g}, {ranks}": decibels(signal, ranks) for signal in SIGNALS for ranks in RANKS}
    columns = ["signal, ranks", *(f"{name}, dB" for name in WAYS)]
    rows = [[name, *(f"{found[way]:.1f}" for way in WAYS)] for name, found in figures.items()]
    finish(arguments, figures, Table("Errors of reduced gradients", columns, rows))


if __name__ == "__main__":
    main()
