"""The matrices that numerics tests run on: five distributions and the edge values of a dtype."""

from collections.abc import Callable

import pytest
import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=rng)


def row_outliers(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """Every seventh row (token, output channel) is 300 times larger."""
    values = torch.randn(shape, generator=rng)
    values.view(-1, shape[-1])[::7] *= 300.0
    return values


def element_outliers(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """One element in 128 is 3000 times larger."""
    values = torch.randn(shape, generator=rng)
    outliers = torch.rand(shape, generator=rng) < 1 / 128
    return torch.where(outliers, 3000.0 * values, values)


def lognormal(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """Both signs, magnitudes over about six decades."""
    magnitude = torch.exp(2.0 * torch.randn(shape, generator=rng))
    return torch.where(torch.rand(shape, generator=rng) < 0.5, -magnitude, magnitude)


def zeros(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    return torch.zeros(shape)


DATA_SETS: dict[str, Callable[[tuple[int, ...], torch.Generator], torch.Tensor]] = {
    "gaussian": gaussian,
    "row_outliers": row_outliers,
    "element_outliers": element_outliers,
    "lognormal": lognormal,
    "zeros": zeros,
}


def make(name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return DATA_SETS[name](shape, generator(seed)).to(dtype)


def spread_columns(weight: torch.Tensor, spread: float = 4.0) -> torch.Tensor:
    """The weight with its columns scaled over a factor of ``e ** spread``, smallest first."""
    return weight * torch.exp(torch.linspace(-spread, 0.0, weight.shape[-1]))


def edge_values(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """(16, 16) matrices at the ends of ``dtype``, all finite."""
    info = torch.finfo(dtype)
    base = gaussian((16, 16), generator(7)).to(dtype)
    one = torch.ones(16, 16, dtype=dtype)
    mixed = base.clone()
    mixed[3] = 0.0
    mixed[5, 2], mixed[5, 3], mixed[6, 0] = info.max, -info.max, info.tiny
    return {
        "largest": one * info.max,
        "smallest_normal": one * info.tiny,
        "smallest_subnormal": one * (info.tiny * info.eps),
        "largest_among_gaussian": mixed,
        "negative_zero": -torch.zeros(16, 16, dtype=dtype),
        "one_value": one * 3.0,
        "tiny_gaussian": (base.float() * 1e-37).to(dtype),
        "zero_row": torch.cat([torch.zeros(1, 16, dtype=dtype), base[1:]]),
    }
