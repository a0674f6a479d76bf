"""The three set-ups of master weights in docs/master_weights.md: each trains, and holds what it promises to hold."""

import re
from pathlib import Path

import pytest
import torch

import f8sub
from f8sub.features.primary_weights.primary_weight import PrimaryWeight
from tests.layers import dy_of, x_of

PAGE = (Path(__file__).parents[2] / "docs" / "master_weights.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.partition("\n## ")[0], re.DOTALL)
WIDTH = 64
HELD = [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, PrimaryWeight)]


@pytest.mark.parametrize("index", range(3), ids=["fp32", "bf16", "float8"])
def test_the_example_trains(index):
    assert len(EXAMPLES) == 3
    torch.manual_seed(0)
    names = {}
    exec(EXAMPLES[index], names)
    model, optimizer = names["model"], names["optimizer"]
    dtype, kind = HELD[index]
    assert model[0].weight.dtype == dtype
    assert kind is None or isinstance(model[0].weight, kind)
    stepped = getattr(optimizer, "optimizer", optimizer)
    assert {p.dtype for group in stepped.param_groups for p in group["params"]} == {torch.float32}
    x = x_of(8, WIDTH, dtype=dtype)
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
