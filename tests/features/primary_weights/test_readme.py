"""The three set-ups of master weights, as the README has them: each trains, and what it promises to hold it holds."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import f8sub
from f8sub.features.primary_weights.primary_weight import PrimaryWeight
from tests.layers import K, N, dy_of, x_of

README = (Path(__file__).parents[3] / "README.md").read_text()
SECTION = README.partition("### Master weights\n")[2].partition("\n## ")[0]
EXAMPLES = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
HELD = [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, PrimaryWeight)]


@pytest.mark.parametrize("index", range(3), ids=["fp32", "bf16", "float8"])
def test_the_example_trains(index):
    assert len(EXAMPLES) == 3
    torch.manual_seed(0)
    names = {
        "model": nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K)),
        "torch": torch,
        "f8sub": f8sub,
    }
    exec(EXAMPLES[index], names)
    model, optimizer = names["model"], names["optimizer"]
    dtype, kind = HELD[index]
    assert model[0].weight.dtype == dtype
    assert kind is None or isinstance(model[0].weight, kind)
    stepped = getattr(optimizer, "optimizer", optimizer)
    assert {p.dtype for group in stepped.param_groups for p in group["params"]} == {torch.float32}
    x = x_of(8, K, dtype=dtype)
    target = dy_of(x)
    losses = []
    for _ in range(50):
        loss = (model(x) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
