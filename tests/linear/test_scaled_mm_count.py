"""A training step of a real Llama: three float8 matmuls for each converted layer, and none for the others."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import f8sub
from tests.counting import Float8Work
from tests.data_sets import generator
from tests.layers import in_float8

RECIPES = f8sub.recipe_names()
LAYERS, PROJECTIONS = 2, 7


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=112,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


def step(model: LlamaForCausalLM) -> tuple[float, int]:
    tokens = torch.randint(0, 96, (2, 24), generator=generator(1))
    with Float8Work() as work:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    return loss.item(), work.matmuls


@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)
def test_three_for_each_converted_layer(recipe):
    plain_loss, none = step(llama())
    model = f8sub.convert_to_float8(llama(), recipe=recipe)
    converted = [module for module in model.modules() if isinstance(module, f8sub.Float8Linear)]
    assert len(converted) == LAYERS * PROJECTIONS
    assert not isinstance(model.lm_head, f8sub.Float8Linear)
    loss, count = step(model)
    assert (none, count) == (0, sum(in_float8(recipe).values()) * len(converted))
    assert loss != plain_loss
    assert abs(loss - plain_loss) < 0.02 * plain_loss
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)
def test_frozen_weights_skip_wgrad_and_a_frozen_input_skips_dgrad(recipe):
    model = f8sub.convert_to_float8(llama(), recipe=recipe)
    layers = [module for module in model.modules() if isinstance(module, f8sub.Float8Linear)]
    for layer in layers[PROJECTIONS:]:
        layer.weight.requires_grad_(False)
    _, count = step(model)
    gemms = in_float8(recipe)
    all_steps = PROJECTIONS * (2 * gemms["y"] + 2 * gemms["dx"] + gemms["dw"])
    assert count == all_steps
    model.model.embed_tokens.weight.requires_grad_(False)
    model.model.layers[0].input_layernorm.weight.requires_grad_(False)
    _, count = step(model)
    assert count == all_steps - 3 * gemms["dx"]  # q, k and v of the first layer read a constant
