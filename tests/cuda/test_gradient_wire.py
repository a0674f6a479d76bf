"""Gradients on the wire by the kernels, on GPUs: the bytes of plain PyTorch, and the sums of FSDP2 over NCCL."""

import pytest
import torch
from torch import nn

import f8sub
from tests.data_sets import gaussian, generator
from tests.gradients import oracle
from tests.gradients.models import FLOAT32, same, sharded
from tests.gradients.test_kernels import bytes_and_sums
from tests.kernels.interpreted import needs_triton

pytestmark = needs_triton
IN, HIDDEN, STEPS = 256, 1042, 3  # a rank has 521 elements of the first bias, behind which nothing is aligned


@pytest.mark.parametrize("codes", [True, False], ids=["e4m3", "bf16"])
def test_bytes_and_sums_are_the_references(codes):
    bytes_and_sums("cuda", codes)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.LayerNorm(HIDDEN), nn.GELU(), nn.Linear(HIDDEN, IN)).cuda()


def backward(model: nn.Module, seed: int) -> None:
    rng = generator(seed)
    x, dy = (gaussian((64, IN), rng).cuda() for _ in range(2))
    model(x).backward(dy)


def over_nccl(rank: int, world: int) -> None:
    """Every step's sums are the oracle's, and the host waits for no device meanwhile."""
    model = sharded(network(), FLOAT32)
    f8sub.reduce_gradients_in_float8(model)
    for step in range(STEPS):
        own = []
        for other in range(world):
            whole = network()
            backward(whole, other + 10 * step)
            own.append([p.grad.cpu() for p in whole.parameters()])
        model.zero_grad()
        rng = generator(rank + 10 * step)
        x, dy = (gaussian((64, IN), rng).cuda() for _ in range(2))
        if step:  # the first one reads which kernels there are
            torch.cuda.set_sync_debug_mode("error")
        model(x).backward(dy)
        torch.cuda.set_sync_debug_mode("default")
        found = [p.grad.full_tensor().cpu() for p in model.parameters()]
        assert same(found, [oracle.summed(list(each)) for each in zip(*own, strict=True)])


def test_fsdp2_over_nccl(ranks):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks(2, over_nccl, gpus=True, timeout=120)
