"""Models of transformers, whose attention is called by way of a table."""

import pytest
import torch

import f8sub
from f8sub.attention.state import CHILD
from tests.budgets import decibels

transformers = pytest.importorskip("transformers")


def llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


IDS = torch.arange(40).view(2, 20) * 7 % 64


def losses(model, **given) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False, **given).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_llama():
    plain, model = llama(), llama()
    found = f8sub.attend_in_float8(model, backend="reference", min_length=0)
    assert found == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert type(model.model.layers[0].self_attn) is type(plain.model.layers[0].self_attn)
    expected = losses(plain)
    made = losses(model)
    assert all(decibels(a, b) > 15 for a, b in zip(expected[1:], made[1:], strict=True))
    assert not torch.equal(expected[0], made[0])
    # Other models of the process stay as they were.
    assert all(torch.equal(a, b) for a, b in zip(expected, losses(plain), strict=True))
    assert (model.model.layers[0].self_attn._modules[CHILD].history[0] > 0).all()
    f8sub.convert_from_float8(model)
    assert all(torch.equal(a, b) for a, b in zip(expected, losses(model), strict=True))


def test_padding_needs_a_mask_and_stays():
    plain, model = llama(), llama()
    f8sub.attend_in_float8(model, backend="reference", min_length=0)
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    expected, found = (losses(each, attention_mask=mask) for each in (plain, model))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert "a mask" in model.model.layers[0].self_attn._modules[CHILD].reason


def test_eager_attention_is_told():
    model = llama(attn_implementation="eager")
    f8sub.attend_in_float8(model, backend="reference", min_length=0)
    losses(model)
    assert "attn_implementation='eager'" in str(f8sub.conversion_report(model))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("causal_first", [False, True])
def test_a_decoder_that_attends_causally_without_a_mask(causal_first, compiled):
    """With use_cache=False compiled code and graphs would make a mask, and stay in high precision."""
    from f8sub.integrations.transformers import attend_causally

    plain, model = llama(), llama()
    calls = [attend_causally, lambda each: f8sub.attend_in_float8(each, backend="reference", min_length=0)]
    for call in calls if causal_first else reversed(calls):
        call(model)
    attend_causally(plain)
    expected = losses(plain)
    if compiled:
        torch._dynamo.reset()
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = losses(model)
    assert all(decibels(a, b) > 15 for a, b in zip(expected[1:], found[1:], strict=True))
    assert not torch.equal(expected[0], found[0])
    states = [module for module in model.modules() if type(module).__name__ == "AttentionState"]
    assert len(states) == 2
    assert all((state.history[0] > 0).all() for state in states)
    assert "attention: 2 of 2" in str(f8sub.conversion_report(model))
