"""Four-bit codes: packing and stochastic rounding."""

import math

import torch

from f8sub.formats import Rounding
from f8sub.kernels import e2m1
from tests import oracle
from tests.data_sets import gaussian, generator

DRAWS, CHANCE_OF_FAILURE = 4096, 1e-9


def grid() -> torch.Tensor:
    """Codes, ties and values in between."""
    return torch.linspace(-6.0, 6.0, 193)


def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average():
    """A draw is within one step of its neighbours: Hoeffding's bound on the mean of 4096 draws is 0.058 steps."""
    torch.manual_seed(0)
    exact = grid().double()
    drawn = e2m1.values(e2m1.cast(grid().expand(DRAWS, -1), Rounding.STOCHASTIC)).double()
    codes = torch.tensor(sorted(set(oracle.VALUES["e2m1"].tolist())), dtype=torch.float64)
    upper = codes[torch.searchsorted(codes, exact)]
    lower = codes[torch.searchsorted(codes, exact, right=True) - 1]
    assert ((drawn == lower) | (drawn == upper)).all()
    bound = math.sqrt(math.log(2 * exact.numel() / CHANCE_OF_FAILURE) / (2 * DRAWS))
    assert ((drawn.mean(0) - exact).abs() <= bound * (upper - lower)).all()
    nearest = e2m1.values(e2m1.cast(grid()[None], Rounding.NEAREST)).double()[0]
    assert ((nearest - exact).abs() > bound * (upper - lower)).any()


def test_the_draws_are_of_torchs_generator_and_nearest_takes_none():
    x = gaussian((8, 64), generator(1))
    torch.manual_seed(3)
    first, second = (e2m1.cast(x, Rounding.STOCHASTIC) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(e2m1.cast(x, Rounding.STOCHASTIC), first)
    state = torch.get_rng_state()
    e2m1.cast(x, Rounding.NEAREST)
    assert torch.equal(torch.get_rng_state(), state)
