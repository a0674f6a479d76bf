"""Weights are cast together with the one that is gathered first: the same losses, by few launches."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

import f8sub
from f8sub.kernels.triton import quantize_cuda
from f8sub.kernels.triton.parts import Part
from f8sub.weights import cast_ahead
from tests.models import float8_layers, loss_of, shard_of, transformer
from tests.weights.ranks.test_cast_once import count_casts
from tests.weights.ranks.test_fsdp_modes import prefetching
from tests.wires import on_each

STEPS = 5


class Together:
    """``part_launch.Parts`` on a CPU."""

    made: list[list[int]]

    def __init__(self, of_many: Sequence[Part]) -> None:
        self.parts = of_many

    def run(self, outs: Sequence[torch.Tensor]) -> None:
        self.made[-1].append(len(outs))
        for part, out in zip(self.parts, outs, strict=True):
            quantize_cuda.cast_into(
                out[: len(part.x)], part.x, part.scale, part.format, part.offset, part.through
            )


def trained(
    rank: int, world: int, recipe: str, first: int | None, trouble: bool
) -> tuple[list[float], list[list[int]], list[int]]:
    """Losses, how many weights each launch of a step cast, and how many were cast alone.

    No launch casts many if ``first`` is None; else the first one casts so many elements. Trouble is a weight that every
    rank changes after scales were computed.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Together, "made", [[]], raising=False)
        if first is not None:
            kernels = SimpleNamespace(takes=lambda part: part.x.numel() > 0, casts_of=Together)
            for module in ("parts", "quantize_cuda"):
                monkeypatch.setattr(cast_ahead, module, kernels)
            monkeypatch.setattr(cast_ahead, "FIRST", first)
        alone = count_casts(monkeypatch)
        model = prefetching(transformer(recipe, spread=2.0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses, counts = [], []
        for step in range(STEPS):
            before = alone.total()
            f8sub.precompute_scales(model)
            if trouble and step == 3:
                with torch.no_grad():
                    shard_of(float8_layers(model)[3]).master.mul_(1.5)
            for _ in range(2):
                loss = loss_of(model, step, rank)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            counts.append(alone.total() - before)
            Together.made.append([])
        return losses, Together.made, counts


def both(rank: int, world: int, recipe: str, first: int, trouble: bool) -> tuple:
    return (
        trained(rank, world, recipe, None, trouble)[0],
        *trained(rank, world, recipe, first, trouble),
        len(float8_layers(transformer(recipe))),
    )


@on_each(("tensorwise", "rowwise", "gridquant", "delayed"))
@pytest.mark.parametrize("trouble", [False, True], ids=["plain", "unannounced"])
def test_few_launches_and_the_same_losses(ranks, recipe, trouble):
    """The first step gathers in an order that is not known yet. Then a launch casts the first weights, and the next one
    the rest; a weight that was changed unannounced has its codes cast alone."""
    for expected, losses, launches, alone, layers in ranks(3, both, recipe, 1000, trouble):
        assert losses == expected
        assert launches[0] == []
        later = launches[1:STEPS]
        if not trouble:
            assert alone[0] >= layers
            # The last one may be left over.
            assert all(count <= 1 for count in alone[1:])
            assert all(
                sum(each) + count == layers and len(each) == 2
                for each, count in zip(later, alone[1:], strict=True)
            )
        assert later[0] == later[1]
