"""What the numerics tables are made of: the matrices that a linear layer meets, and the figures of an error."""

from __future__ import annotations

from collections.abc import Callable

import torch

from f8sub import Operand
from f8sub.kernels import reference

Draw = Callable[[tuple[int, int], torch.Generator], torch.Tensor]


def gaussian(shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=rng)


def student_t(shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    """Three degrees of freedom: the tails of trained weights and activations."""
    chi_square = torch.randn((3, *shape), generator=rng).square().sum(0)
    return torch.randn(shape, generator=rng) / (chi_square / 3).sqrt()


def lognormal_rows(shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    """Row norms lognormal with sigma 4, as gradients of tokens of unequal weight have them."""
    return torch.randn(shape, generator=rng) * torch.exp(4.0 * torch.randn((shape[0], 1), generator=rng))


def lognormal_columns(sigma: float) -> Draw:
    """Channels of unequal size: column norms at the quantiles of a lognormal distribution, in random order."""

    def draw(shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
        quantiles = (torch.randperm(shape[1], generator=rng) + 0.5) / shape[1]
        return torch.randn(shape, generator=rng) * torch.exp(sigma * torch.special.ndtri(quantiles))

    return draw


def element_outliers(shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    """One element in 8192 is 10,000 times larger."""
    values = torch.randn(shape, generator=rng)
    return torch.where(torch.rand(shape, generator=rng) < 1 / 8192, 1e4 * values, values)


def sqnr(true: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Signal to noise in dB along the last dimension; infinite where ``found`` is exact."""
    true = true.double()
    return 10 * torch.log10(true.square().sum(-1) / (true - found.double()).square().sum(-1))


def errors(true: torch.Tensor, found: torch.Tensor) -> dict[str, float]:
    """SQNR in dB of the whole matrix, and the median over its rows: a whole hides its small rows."""
    return {
        "sqnr": sqnr(true.flatten(), found.flatten()).item(),
        "median_row_sqnr": sqnr(true, found).nanmedian().item(),
    }


def flushed(operand: Operand, values: torch.Tensor) -> float:
    """Share of the elements of ``values``, stored as ``operand`` is, that are not zero and whose codes are."""
    found = reference.dequantize(operand, torch.float32)
    return float(((found == 0) & (values != 0)).double().mean())


def percent(share: float | None) -> str:
    """Two digits, in a table's cell."""
    if share is None:
        return "-"
    if 0 < share < 1e-4:
        return "<0.01%"
    return f"{100 * share:.2g}%"
