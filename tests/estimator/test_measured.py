"""Every figure that the documentation holds of an H200 or H100 is predicted within 10 %, or named with the reason."""

import pytest

from f8sub.estimator import gpus, seconds
from f8sub.estimator.seconds import Run
from tests.estimator.predictions import (
    DATA,
    Figure,
    figures,
    model,
)

WITHIN = 0.10
FIGURES = list(figures())


def name_of(figure: Figure) -> str:
    place = DATA["set"].index(figure.group), figure.group["rows"].index(figure.row)
    about = figure.row.get("recipe", figure.row.get("sizes"))
    return f"{place[0]}-{place[1]}-{about}-{figure.what}"


@pytest.mark.parametrize("figure", FIGURES, ids=name_of)
def test_a_measured_figure(figure):
    error = figure.error()
    told = f"{figure.group['title']}: {figure.row}: {figure.what} is predicted {error:+.1%}"
    if figure.miss:
        assert abs(error) > WITHIN, f"it is within 10 %, so it is no miss ({figure.miss}): {told}"
    else:
        assert abs(error) <= WITHIN, told


def test_every_set_says_where_it_comes_from():
    for group in DATA["set"]:
        assert all(group[key] for key in ("title", "machine", "recorded", "command")), group["title"]
    assert len(FIGURES) > 150


SHARES = {
    gpus.WHOLE: ((6, 0.94, 2), (5, 0.97, 2), (5, 0.96, 2)),
    gpus.ROWS: ((6, 0.86, 2), (3, 0.89, 1), (5, 0.92, 2)),
    gpus.VECTORS: ((4, 0.88, 1), (3, 0.86, 1), (3, 0.90, 1)),
    gpus.SQUARES: ((4, 0.81, 1), (3, 0.78, 1), (3, 0.78, 1)),
}
"""Of docs, "Quantizers on a GPU": both usages, rows, columns. Of squares those of 256x256."""


def test_shares_of_casts_are_those_that_were_measured():
    assert {kind: tuple(seconds.CASTS[kind]) for kind in SHARES} == SHARES
    assert (seconds.TRANSPOSED[:2], seconds.DERIVED[gpus.ROWS][:2]) == ((2, 0.83), (3, 0.67))


@pytest.mark.parametrize(
    ("checkpoint", "products"), [("none", 14), ("selective", 17), ("gemms", 14), ("full", 20)]
)
def test_products_of_a_blocks_backward(checkpoint, products):
    """Counted in torch.compile's graphs of a Llama block of seven layers, without checkpointing, and by torchtitan's
    selective policy."""
    block = next(iter(model("8b", 4).blocks.values()))
    again = seconds.repeats(block, Run(checkpoint=checkpoint))
    assert 2 * len(block) + sum(again) == products
