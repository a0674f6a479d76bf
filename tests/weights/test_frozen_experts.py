"""Frozen experts of three dimensions as codes alone: the numbers of high-precision weights, at a byte an element."""

import copy
import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import f8sub
from f8sub.weights.primary_weight import PrimaryWeight
from tests.experts.models import experts_of, of_transformers

TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
CASES = [
    ("mixtral", "rowwise"),
    ("qwen3_moe", "tensorwise"),
    ("gpt_oss", "rowwise"),
    ("deepseek_v3", "mxfp8"),
]


def made(kind: str, recipe: str, primary: bool) -> torch.nn.Module:
    given = {"experts": True, "skip_defaults": False, "backend": "reference", "primary_weights": primary}
    model = f8sub.convert_to_float8(of_transformers(kind), recipe, **given)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("proj" not in name)
    return model


def weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p for module in experts_of(model) for p in module.parameters() if p.dim() == 3]


def stepped(model: torch.nn.Module) -> list[torch.Tensor]:
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize(("kind", "recipe"), CASES)
def test_codes_alone_compute_what_high_precision_does(kind, recipe):
    plain, model = made(kind, recipe, primary=False), made(kind, recipe, primary=True)
    held = [StorageWeakRef(p.untyped_storage()) for p in weights_of(model)]
    f8sub.drop_high_precision(model)
    expected, found = stepped(plain), stepped(model)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    gc.collect()
    assert all(each.expired() for each in held)
    for weight in weights_of(model):
        assert isinstance(weight, PrimaryWeight)
        data = weight.primary.codes.rowwise.data
        assert data.untyped_storage().nbytes() == weight.numel()
        assert weight.detach().clone().shape == weight.shape
    f8sub.restore_high_precision(model)
    assert torch.equal(model(TOKENS, labels=TOKENS).loss, found[0])


def test_a_state_dict_and_a_copy_have_the_values_of_the_codes():
    model = made("qwen3_moe", "rowwise", primary=True)
    f8sub.drop_high_precision(model)
    loss = model(TOKENS, labels=TOKENS).loss
    state = model.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    assert torch.equal(copy.deepcopy(model)(TOKENS, labels=TOKENS).loss, loss)
    other = made("qwen3_moe", "rowwise", primary=False)
    other.load_state_dict(state)
    assert torch.equal(other(TOKENS, labels=TOKENS).loss, loss)


def test_experts_whose_scales_reach_over_several_stay_in_high_precision():
    """One scale of two levels an expert, of nvfp4, is no scale of all experts' rows."""
    model = made("qwen3_moe", "nvfp4", primary=True)
    f8sub.drop_high_precision(model)
    assert not any(isinstance(weight, PrimaryWeight) for weight in weights_of(model))
    assert any(isinstance(p, PrimaryWeight) for p in model.parameters())
    for weight in weights_of(model):
        weight.requires_grad_()
    stepped(model)
    torch.optim.AdamW(weights_of(model)).step()  # which needs no masters beside them


@pytest.mark.long
def test_compiled_experts_read_the_codes():
    model = made("qwen3_moe", "rowwise", primary=True)
    f8sub.drop_high_precision(model)
    expected = stepped(model)
    for parameter in model.parameters():
        parameter.grad = None
    found = stepped(torch.compile(model, backend="aot_eager"))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_experts_that_learn_as_codes_do_what_high_precision_does(recipe):
    found = []
    for primary in (False, True):
        model = made("qwen3_moe", recipe, primary)
        model.float().requires_grad_()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if primary:
            optimizer = f8sub.optim.MasterWeights(optimizer)
        losses = []
        for _ in range(3):
            losses += [stepped(model)[0]]
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
        assert all(isinstance(w, PrimaryWeight) == primary for w in weights_of(model))
    assert torch.equal(*map(torch.stack, found))
