"""skip_step_if_nonfinite where a wait of the host would cost: it decides on the device."""

import pytest
import torch

import f8sub
from tests.cuda.sharded import model_on_gpu, train
from tests.cuda.test_linear import NoSync
from tests.models import BF16, shard


def guarded_steps(rank: int, world: int) -> tuple[int, bool]:
    """Steps skipped, and whether the bad one left every weight and state as it was."""
    model = shard(model_on_gpu("tensorwise"), BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    guard = f8sub.skip_step_if_nonfinite(optimizer)
    train(model, optimizer, rank, steps=3)
    with NoSync():
        train(model, optimizer, rank, steps=2, losses=False)
    tensors = [p.to_local() for p in model.parameters()]
    tensors += [getattr(v, "_local_tensor", v) for state in optimizer.state.values() for v in state.values()]
    before = [tensor.clone() for tensor in tensors]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    with NoSync():
        optimizer.step()
    return int(guard.skipped), all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("world", [1, 2])
def test_the_host_never_waits_and_a_bad_step_changes_nothing(ranks, world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    assert ranks(world, guarded_steps, gpus=True, timeout=120) == [(1, True)] * world
