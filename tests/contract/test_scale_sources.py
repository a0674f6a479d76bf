"""The contract of a ScaleSource: every source by every recipe, parts of a matrix, kept amaxes, eager and compiled."""

from collections.abc import Callable

import pytest
import torch

import f8sub
from f8sub import ALL, Tile
from f8sub.delayed.state import OPERANDS, ScalingState
from f8sub.kernels.quantize import quantize
from f8sub.kernels.scales import CURRENT, GivenScale, LayerSource, PriorScale, ScaleSource
from f8sub.linear.shared_input import Formats
from tests import oracle
from tests.data_sets import generator, lognormal, row_outliers
from tests.specs import spec_of

SHAPE, PART = (512, 768), 256
RECIPES = [name for name in oracle.RECIPES if name != "nvfp4"]
"""All whose scales and codes are those of single tiles: two levels and packed codes reach over parts."""


def state(scale: float = 0.0) -> ScalingState:
    made = ScalingState(f8sub.get_recipe("delayed"), torch.device("cpu"))
    made.scale.fill_(scale)
    return made


def given(scale: float) -> GivenScale:
    return GivenScale(PriorScale(torch.full((1, 1), scale), 0.0, covers=False))


def delayed(scale: float) -> LayerSource:
    return state(scale).sources(stage=False, frozen=False).x


WITH_A_PRIOR: dict[str, Callable[[float], ScaleSource]] = {"given": given, "delayed": delayed}


def of_the_whole(whole: torch.Tensor, dim: int, start: int) -> Callable[[torch.Tensor, Tile], torch.Tensor]:
    """Amaxes of the part of a matrix that begins at ``start``, by numpy of all of it."""

    def reduce(amax: torch.Tensor, tile: Tile) -> torch.Tensor:
        edges = tuple(None if edge == ALL else edge for edge in (tile.rows, tile.cols))
        found = torch.from_numpy(oracle.largest_of_tiles(abs(oracle.to_numpy(whole)), edges)).float()
        if edges[dim] is not None:
            found = found.narrow(dim, start // edges[dim], amax.shape[dim - 2])
        return found.expand(amax.shape).clone()

    return reduce


def check_parts(formats: Formats, source: LayerSource | GivenScale, dim: int) -> None:
    """Every part, under the amaxes of the whole, has the codes and scales of the whole."""
    whole = row_outliers(SHAPE, generator(1))
    expected = quantize(whole, *formats, source)
    for start in range(0, SHAPE[dim], PART):
        part = whole.narrow(dim, start, PART).contiguous()
        reduce = of_the_whole(whole, dim, start)
        found = quantize(part, *formats, source._replace(reduce=reduce))
        for operand, right, along in zip(found[:2], expected[:2], (dim, 1 - dim), strict=True):
            assert (operand is None) == (right is None)
            if operand is not None:
                cut = right.data.narrow(along, start, PART).view(torch.uint8)
                assert torch.equal(operand.data.view(torch.uint8), cut)
                edge, scales = (right.format.tile.rows, right.format.tile.cols)[along], right.scale_inv
                if edge != ALL:
                    scales = scales.narrow(along, start // edge, PART // edge)
                assert torch.equal(operand.scale_inv.float(), scales.float())
        assert found.amax is expected.amax is None or torch.equal(found.amax, expected.amax)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_part_under_the_amaxes_of_the_whole_has_the_codes_of_the_whole(recipe, dim):
    for name in OPERANDS:
        check_parts(f8sub.get_recipe(recipe).formats(name), CURRENT, dim)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("source", WITH_A_PRIOR)
@pytest.mark.parametrize("scale", [0.0, 0.37])
def test_so_has_a_part_with_a_prior_scale_or_a_first_one(source, scale, dim):
    check_parts(f8sub.get_recipe("delayed").formats("x"), WITH_A_PRIOR[source](scale), dim)


@pytest.mark.parametrize("source", WITH_A_PRIOR)
@pytest.mark.parametrize("operand", ["x", "dy"])
def test_a_prior_scale_is_used_whatever_the_matrix_is(source, operand):
    row, col = f8sub.get_recipe("delayed").formats(operand)
    spec = spec_of(row)
    x = lognormal((48, 64), generator(2))
    for scale in (0.37, 64.0):
        made = quantize(x, row, col, WITH_A_PRIOR[source](scale))
        most = oracle.MAX[spec.format]
        exact = (oracle.to_numpy(x).astype("float32") * scale).clip(-most, most)
        codes = oracle.nearest_code(exact.astype("float64"), spec.format)
        assert (made.rowwise.data.view(torch.uint8).numpy() == codes).all()
        assert (made.columnwise.data.view(torch.uint8).numpy() == codes.T).all()
        assert made.rowwise.scale_inv.item() == pytest.approx(1 / scale, rel=1e-7)
        assert made.amax.item() == x.abs().max().item()
