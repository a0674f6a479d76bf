"""A monitor's kernels on a GPU: what plain PyTorch tells there; and that nothing waits for the device."""

import pytest
import torch
from torch import nn

import f8sub
from tests.diagnostics.test_kernels import COLS, ROWS, kernels_agree
from tests.kernels.interpreted import needs_triton


@needs_triton
@pytest.mark.parametrize("looked_at", [2**21, ROWS * COLS // 3], ids=["all", "some rows"])
def test_kernels_tell_what_plain_pytorch_does(looked_at):
    kernels_agree("cuda", looked_at)


def test_a_sample_waits_for_nothing():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).cuda()
    f8sub.convert_to_float8(model, min_dim=0)
    x = torch.randn(32, 64, device="cuda")
    monitor = f8sub.Monitor(model, every=1)
    for step in range(3):
        if step:  # the first one compiles kernels
            torch.cuda.set_sync_debug_mode("error")
        with monitor:
            model(x).square().mean().backward()
        torch.cuda.set_sync_debug_mode("default")
    monitor.flush()
    assert len(monitor.rows) == 3 * 2 * 3
