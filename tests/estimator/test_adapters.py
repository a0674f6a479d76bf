"""Memory of adapters over a frozen base, against what a model of PEFT holds and saves."""

import contextlib
import weakref

import peft
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import f8sub
from f8sub.estimator.bytes import adapters_of, memory
from f8sub.estimator.estimate import shapes_of
from f8sub.estimator.seconds import Run

BF16 = torch.bfloat16
TOKENS = 256


def adapted(
    *, codes: bool | None = True, in_bf16: bool = True, layers: int = 2, **options: object
) -> nn.Module:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(BF16)
    primary = codes is not False
    model = f8sub.convert_to_float8(model, "rowwise", primary_weights=primary).requires_grad_(False)
    if codes:
        f8sub.drop_high_precision(model)
    lora = peft.LoraConfig(r=16, target_modules="all-linear", **options)
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=not in_bf16)


def bytes_held(model: nn.Module) -> int:
    """Of the storages of all parameters, of codes those that stand for them."""
    found = {}
    for parameter in model.parameters():
        is_codes = type(parameter).__name__ == "PrimaryWeight" or hasattr(parameter, "primary")
        tensor = parameter.primary.codes.rowwise.data if is_codes else parameter.detach()
        found[tensor.data_ptr()] = tensor.numel() * tensor.itemsize
    return sum(found.values())


class Saved:
    """A tensor that backward will read; gone when no graph needs it any more."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def saved(model: nn.Module, *, adapters: bool) -> int:
    """Bytes of the activations that backward reads, each storage once; no parameter, and no number of a row alone."""
    known = {parameter.data_ptr() for parameter in model.parameters() if not hasattr(parameter, "primary")}
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Saved:
        made = Saved(tensor)
        alive.add(made)
        return made

    tokens = torch.randint(0, 256, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    hidden = model.get_input_embeddings()(tokens).requires_grad_()
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each.tensor),
        contextlib.nullcontext() if adapters else model.disable_adapter(),
    ):
        y = model(inputs_embeds=hidden, use_cache=False).logits
    found = {}
    for tensor in (each.tensor for each in alive):
        if type(tensor) is torch.Tensor and tensor.data_ptr() not in known and tensor.numel() >= 16 * TOKENS:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    del y
    return sum(found.values())


CASES = {
    "bf16": {},
    "float32 adapters": {"in_bf16": False},
    "dropout": {"lora_dropout": 0.1},
    "DoRA": {"use_dora": True},
    "base in high precision": {"codes": False},
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_are_held_and_the_optimizer_has_two_states(case):
    model = adapted(**CASES[case])
    shapes, run = shapes_of(model), Run(TOKENS, TOKENS, 1, sharded=False)
    found = memory(shapes, f8sub.get_recipe("rowwise"), run, adapters_of(model, shapes))
    assert found.weights == bytes_held(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    states = [s for state in optimizer.state.values() for s in state.values() if s.dim()]
    assert found.optimizer == sum(state.numel() * state.itemsize for state in states)
    assert (found.codes > 0) == (not CASES[case].get("codes", True))


@pytest.mark.parametrize("case", [name for name in CASES if name != "base in high precision"])
def test_what_adapters_save_is_what_is_saved_more_with_them(case):
    model = adapted(**CASES[case])
    measured = saved(model, adapters=True) - saved(model, adapters=False)
    if case == "dropout":  # whose mask has one byte an element on a GPU, and as many as x on a CPU
        layers = (layer for layer in model.modules() if isinstance(layer, f8sub.Float8Linear))
        measured -= TOKENS * sum(layer.in_features for layer in layers)
    assert adapters_of(model, shapes_of(model)).saved * TOKENS == pytest.approx(measured, rel=0.1)


def test_a_base_on_meta_counts_as_the_codes_that_it_becomes():
    held = adapted()
    with torch.device("meta"):
        planned = adapted(codes=None).to(BF16)  # PEFT makes adapters in float32 over a base on meta
    found, expected = (adapters_of(model, shapes_of(model)) for model in (planned, held))
    assert found == expected


def test_a_page_of_adapters_has_an_optimizer_of_what_learns():
    model = adapted()
    found = f8sub.estimate(model, ["rowwise"], tokens=TOKENS, mesh=(1,))
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert {policy.float8.optimizer for policy in found.policies} == {2 * 2 * learning}
    by_name = {policy.checkpoint: policy.float8.activations for policy in found.policies}
    assert by_name["full"] < by_name["none"]
    page = str(found)
    assert f"of which {learning:,} learn" in " ".join(page.split())
    assert "  mlp.down_proj   " in page
    assert "  mlp.down_proj.lora_A   " in page


def test_models_without_adapters_are_as_before():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    assert adapters_of(model, shapes_of(model)) is None
