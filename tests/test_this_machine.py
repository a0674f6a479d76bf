"""Does f8sub work on this machine? One small check of each thing that a training run needs; ``test.sh --quick``."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import f8sub
from tests.compiling import compile_blocks, mlps, train
from tests.data_sets import gaussian, generator
from tests.models import BF16, loss_of, shard, take_step, transformer

DEVICE = "cuda" if torch.cuda.device_count() else "cpu"


@pytest.mark.parametrize("recipe", f8sub.recipe_names())
def test_it_learns(recipe):
    """A regression: its loss falls to less than half, in bf16 and on the GPU if there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(DEVICE, torch.bfloat16)
    f8sub.convert_to_float8(model, recipe=recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = gaussian((128, 64), generator(1)).to(DEVICE, torch.bfloat16)
    losses = []
    for _ in range(12):
        losses.append(take_step(optimizer, (model(x) - x.roll(1, -1)).float().square().mean()))
        f8sub.precompute_scales(model)
    assert losses[-1] < losses[0] / 2


def three_steps(rank: int, world: int, all_gather: bool) -> tuple[list[float], bool]:
    """Losses under FSDP2; whether a state dict that is saved and loaded leaves the next loss as it was."""
    model = shard(transformer("tensorwise", all_gather=all_gather), BF16)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(3):
        losses.append(take_step(optimizer, loss_of(model, step, rank)))
        f8sub.precompute_scales(model)
    before = loss_of(model, 3, rank).item()
    set_model_state_dict(model, {name: value.clone() for name, value in get_model_state_dict(model).items()})
    f8sub.precompute_scales(model)
    return losses, before == loss_of(model, 3, rank).item()


def test_two_ranks_gather_in_float8_what_they_gather_in_bf16(ranks):
    found, expected = ranks(2, three_steps, True), ranks(2, three_steps, False)
    assert found == expected
    assert all(len(set(losses)) == 3 and same for losses, same in found)


@pytest.mark.parametrize("world", [3])
def test_ranks_reach_each_other(rank, world):
    tensor = torch.full((4,), float(rank + 1), dtype=torch.float32)
    dist.all_reduce(tensor)
    assert tensor.sum().item() == 24.0


def test_torch_compile_gives_what_eager_code_gives():
    """With Inductor, which needs a C++ compiler here, or Triton on a GPU."""
    expected = train(mlps("tensorwise"), steps=1)
    found = train(compile_blocks(mlps("tensorwise"), backend="inductor"), steps=1)
    torch.testing.assert_close(found.outputs, expected.outputs, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=2e-2, atol=2e-2)
