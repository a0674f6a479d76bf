"""Blocks of e4m3 codes: an oracle's values in float64, and how large the error is, by data and by ranks."""

import numpy as np
import pytest
import torch

from f8sub.gradients.wire import decode, encode
from scripts.tables.gradient_errors import ring
from tests.data_sets import edge_values, gaussian, generator, make
from tests.gradients import oracle


def through(x: torch.Tensor) -> torch.Tensor:
    return decode(*encode(x[None]))[0]


@pytest.mark.parametrize("name", ["gaussian", "row_outliers", "element_outliers", "lognormal", "zeros"])
def test_values(name):
    x = make(name, (3, 517), 1, torch.float32).flatten()
    assert np.array_equal(through(x).numpy(), oracle.rounded(x.numpy()))


def test_every_magnitude():
    """Blocks from the smallest subnormal number to the largest number, and ties."""
    rng = generator(2)
    x = gaussian((270, 128), rng) * 2.0 ** torch.arange(-145, 125)[:, None].double()
    x = torch.cat(
        [x.float().flatten(), torch.cat([v.flatten() for v in edge_values(torch.float32).values()])]
    )
    assert x.abs().max() == torch.finfo(torch.float32).max
    ties = torch.arange(0.0, 416.0, 0.5 / 8)[:5120]
    for data in (x, ties):
        assert np.array_equal(through(data).numpy(), oracle.rounded(data.numpy()))


def test_nan_and_infinity_leave_their_neighbours_alone():
    x = gaussian((512,), generator(3))
    right = through(x)
    bad = {3: float("nan"), 130: float("inf"), 131: -float("inf"), 200: float("nan")}
    spoiled = x.clone()
    for place, value in bad.items():
        x[place], spoiled[place] = 0.0, value
    found = through(spoiled)
    right = through(x)
    for place, value in bad.items():
        right[place] = value
    torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


def test_finite_stays_finite():
    """What e4m3 would round up to 2**128 becomes the largest code that float32 holds, so that it can meet infinity."""
    highest = torch.finfo(torch.float32).max
    x = torch.tensor([highest, -highest, 1.9375 * 2.0**127, 1.875 * 2.0**127, float("inf"), -1.0])
    found = through(x)
    assert found.tolist() == [*(1.875 * 2.0**127 * s for s in (1, -1, 1, 1)), float("inf"), 0.0]
    assert (found[:4] + through(torch.full((4,), -float("inf")))).tolist() == [-float("inf")] * 4


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 512])
@pytest.mark.parametrize("signal", [0.1, 1.0])
def test_error_by_ranks(ranks, signal):
    """At least 31 dB with any number of ranks; from 512 on less error than a bfloat16 ring has.

    ``signal`` is the part that all ranks' gradients have, relative to what is each one's.
    """
    rng = generator(ranks)
    of_ranks = gaussian((4096,), rng) * signal + gaussian((ranks, 4096), rng)
    exact = of_ranks.double().mean(0)
    ours = oracle.decibels(decode(*encode(of_ranks)).sum(0) / ranks, exact)
    assert ours >= 31
    if ranks == 512:
        assert ours > oracle.decibels(ring(of_ranks) / ranks, exact)
