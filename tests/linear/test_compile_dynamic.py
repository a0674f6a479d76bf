"""torch.compile where batches and sequences change their length: compiled once or twice, bitwise eager's results."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import f8sub
from f8sub.kernels.gemm import scaled_mm
from tests.compiling import SHAPES, WIDTH, Compiler, compile_blocks, differences, gained, train
from tests.data_sets import gaussian, generator
from tests.models import seed_weights
from tests.selection import long_but

SHORT = [("True", "tensorwise"), ("None", "mxfp8"), ("marked", "blockwise")]
CASES = [*SHORT, ("True", "nvfp4"), ("True", "delayed"), ("None", "delayed")]
"""Ways to shapes that change (``dynamic=True``, ``dynamic=None``, ``mark_dynamic``), each with a recipe."""


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("mode", "recipe"), long_but(SHORT, CASES))
def test_lengths_that_change(mode, recipe):
    """No float that f8sub reads is an input of the graph: two layers could not share it, and it would not be folded."""
    eager = train(gained(recipe), steps=5, shapes=SHAPES)
    compiler = Compiler()
    model = compile_blocks(gained(recipe), compiler, dynamic=True if mode == "True" else None)
    compiled = train(model, steps=5, shapes=SHAPES, marked=mode == "marked")
    assert differences(compiled, eager) == []
    assert compiler.floats == []
    # Delayed scaling is compiled once more when its scales are made, the others without a hint for the first shape.
    assert compiler.graphs == (2 if mode == "None" or recipe == "delayed" else 1)


@pytest.mark.long
def test_lengths_that_are_filled_up(monkeypatch):
    """As on a GPU, whose products take multiples of 16: lengths that are none are compiled with those that are."""
    monkeypatch.setattr(scaled_mm, "_fills_up", lambda codes: True)
    shapes = [(2, 5), (3, 16), (5, 33)]
    eager = train(gained("tensorwise"), shapes=shapes)
    compiler = Compiler()
    compiled = train(compile_blocks(gained("tensorwise"), compiler, dynamic=True), shapes=shapes)
    assert differences(compiled, eager) == []
    assert compiler.graphs == 1


class Gated(nn.Module):
    """Two siblings that read one x."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.left(x)) * self.right(x)


def test_floats_that_users_choose():
    """Those of two blocks differ: of the second one dynamo takes what it reads by the same names for dynamic."""
    model = nn.Sequential(Gated(), Gated()).bfloat16()
    recipes = {f"{i}.*": f8sub.get_recipe("delayed", margin=i + 0.5, dy_margin=i + 4.5) for i in range(2)}
    f8sub.convert_to_float8(seed_weights(model), recipes)
    twin, compiler = copy.deepcopy(model), Compiler()
    for block in model:
        block.compile(backend=compiler, fullgraph=True)
    results = []
    for each in (model, twin):
        y = each(gaussian((5, WIDTH), generator(1)).bfloat16())
        y.backward(gaussian((5, WIDTH), generator(2)).bfloat16())
        results.append([y, *(parameter.grad for parameter in each.parameters())])
    assert all(torch.equal(found, right) for found, right in zip(*results, strict=True))
    assert compiler.floats == []


@pytest.mark.parametrize(
    ("how", "dynamic", "recipe"),
    [
        pytest.param("blocks", None, "blockwise", marks=pytest.mark.long),
        pytest.param("whole", True, "tensorwise", marks=pytest.mark.long),
    ],
)
def test_llama_of_transformers(how, dynamic, recipe):
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,  # with fewer, sums over heads are in another order, of the plain model too
    )
    model = f8sub.convert_to_float8(seed_weights(LlamaForCausalLM(config)), recipe)
    twin, compiler = copy.deepcopy(model), Compiler()
    for module in model.model.layers if how == "blocks" else [model]:
        module.compile(backend=compiler, fullgraph=True, dynamic=dynamic)
    for sequence in (12, 20, 9, 33, 17):
        tokens = torch.randint(0, 96, (2, sequence), generator=generator(sequence))
        results = []
        for each in (model, twin):
            each.zero_grad()
            out = each(input_ids=tokens, labels=tokens, use_cache=False)
            out.loss.backward()
            results.append([out.logits, *(parameter.grad for parameter in each.parameters())])
        assert all(torch.equal(found, right) for found, right in zip(*results, strict=True))
    # As of the model before it was converted: with dynamic=True its own floats make dynamo call the backend twice.
    assert compiler.graphs == 2
