"""A plan's key, which stands for it in compiled code that torch keeps on disk."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

import f8sub
from f8sub.kernels.gemm import select
from f8sub.kernels.gemm.select import Plan
from scripts.table import ROOT

KEYS = """
import json, torch, f8sub
from f8sub.kernels.gemm.select import Plan
names = sorted(f8sub.recipe_names(), reverse=True)
print(json.dumps({name: Plan.make(f8sub.get_recipe(name), torch.device("cpu")).key for name in names}))
"""

COMPARE = """
import sys, torch, f8sub
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), sys.argv[1])
x = torch.randn(32, 64)
def step(function):
    model.zero_grad()
    y = function(x)
    y.square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]
expected = step(model)
found = step(torch.compile(lambda x: checkpoint(model, x, use_reentrant=False)))
for one, other in zip(found, expected, strict=True):
    error = ((one - other).norm() / other.norm()).item()
    assert error < 1e-3, error  # 2e-2 and more from another recipe
"""


def run(code: str, *arguments: str, **variables: str) -> str:
    how = {"env": {**os.environ, "PYTHONPATH": str(ROOT), **variables}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code, *arguments], **how)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_plan_has_one_key_in_every_process():
    """Numbers in the order of conversions would name another recipe in another process, whose code is on the disk."""
    recipes = {name: f8sub.get_recipe(name) for name in f8sub.recipe_names()}
    recipes |= {f"{name} dgrad": r.with_high_precision(dgrad=True) for name, r in recipes.items()}
    keys = {name: Plan.make(recipe, torch.device("cpu")).key for name, recipe in recipes.items()}
    assert len(set(keys.values())) == len(keys)
    assert json.loads(run(KEYS)).items() <= keys.items()


def test_other_code_gives_another_key(monkeypatch):
    before = Plan.make(f8sub.get_recipe("tensorwise"), torch.device("cpu"))
    monkeypatch.setattr(select, "source_digest", lambda: "another")
    fields = [getattr(before, field.name) for field in dataclasses.fields(before) if field.name != "key"]
    made = Plan._of.__func__.__wrapped__(Plan, *fields)
    del Plan.made[made.key]
    assert made.key != before.key


@pytest.mark.long
def test_code_on_disk_is_that_of_the_recipe(tmp_path):
    """torch keeps the code of checkpointed functions, in which it does not look for functions that it does not know."""
    for recipe in ("tensorwise", "blockwise", "rowwise"):
        run(COMPARE, recipe, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
