"""Models of transformers, whose attention is called by way of a table."""

import pytest
import torch
from safetensors import safe_open

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


def model_of(kind: str, **options):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
    }  # fmt: skip
    config, model = (getattr(transformers, f"{kind}{part}") for part in ("Config", "ForCausalLM"))
    return model(config(**{**sizes, **options}))


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


PACKED = torch.cat([torch.arange(8), torch.arange(12)]).expand(2, -1)

STAYS = {
    "a window": ("Mistral", {"sliding_window": 8}, {}, "the call has a mask"),
    "softcap": ("Gemma2", {"sliding_window": 8}, {}, "attn_implementation='eager'"),
    "sinks": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {},
        "attn_implementation='eager'",
    ),
    "packed": ("Llama", {}, {"position_ids": PACKED}, "the call has a mask"),
    "dropout": ("Llama", {"attention_dropout": 0.5}, {}, "the call has dropout"),
    "values of another width": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 2,
        },
        {},
        "q, k and v are not (batch, heads, rows, width), with k and v of one shape",
    ),
}


@pytest.mark.parametrize("case", STAYS)
def test_what_needs_high_precision_stays_and_says_why(case):
    kind, options, given, reason = STAYS[case]
    plain, model = model_of(kind, **options), model_of(kind, **options)
    f8sub.attend_in_float8(model, backend="reference", min_length=0)
    expected, found = [], []
    for each, into in ((plain, expected), (model, found)):
        torch.manual_seed(1)
        into += losses_of_trained(each.train(), **given)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert f"(2 not: {reason}" in f8sub.conversion_report(model).summary


def losses_of_trained(model, **given) -> list[torch.Tensor]:
    loss = model(input_ids=IDS, labels=IDS, use_cache=False, **given).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_a_window_of_some_layers_and_one_that_holds_all_tokens():
    model = model_of("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    f8sub.attend_in_float8(model, backend="reference", min_length=0)
    losses(model)
    assert "attention: 1 of 2 modules in float8" in f8sub.conversion_report(model).summary
    model = model_of("Mistral", sliding_window=64)
    f8sub.attend_in_float8(model, backend="reference", min_length=0)
    losses(model)
    assert "attention: 2 of 2 modules in float8" in f8sub.conversion_report(model).summary


def test_evaluation_and_generation_change_nothing_of_training():
    """With a cache of any kind; the report goes on to tell how it trains."""
    model, plain = llama(), llama()
    for each in (model, plain):
        f8sub.attend_in_float8(each, backend="reference", min_length=4)
        losses(each)
    model.eval()
    with torch.no_grad():
        evaluated = model(input_ids=IDS, labels=IDS).loss
    assert torch.equal(evaluated, model(input_ids=IDS, labels=IDS, use_cache=False).loss)
    given = {"max_new_tokens": 6, "do_sample": False}
    found = [
        model.generate(IDS[:1, :8], **given),
        model.generate(IDS[:1, :8], **given, cache_implementation="static"),
        model.generate(IDS[:1, :8], **given, use_cache=False),
        model.generate(IDS[:1, :8], **given, num_beams=2),
    ]
    assert all(each.shape == (1, 14) for each in found)
    assert torch.equal(found[0], found[1])
    report = f8sub.conversion_report(model)
    assert "attention: 2 of 2 modules in float8 (reference, backward in e4m3)" in report.summary
    model.train()
    assert all(torch.equal(a, b) for a, b in zip(losses(model), losses(plain), strict=True))


@pytest.mark.parametrize("attend_first", [False, True])
def test_adapters_over_frozen_layers(attend_first, tmp_path):
    """They train, and what is saved of them, or merged, is without histories."""
    peft = pytest.importorskip("peft")
    model = llama()
    if attend_first:
        f8sub.attend_in_float8(model, backend="reference", min_length=0)
    f8sub.convert_to_float8(model, "rowwise", min_dim=0, backend="reference")
    torch.manual_seed(1)
    options = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, **options))
    if not attend_first:
        f8sub.attend_in_float8(model, backend="reference", min_length=0)
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.5)
    before = [p.detach().clone() for p in learning]
    for _ in range(2):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        f8sub.precompute_scales(model)
    assert not any(torch.equal(a, b) for a, b in zip(before, learning, strict=True))
    states = [each.state for each in f8sub.conversion_report(model).attention]
    assert all((state.history[:2] > 0).all() for state in states)
    model.save_pretrained(tmp_path / "adapters")
    with safe_open(tmp_path / "adapters" / "adapter_model.safetensors", "pt") as file:
        assert all("lora" in name for name in file.keys())  # noqa: SIM118
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    _, told = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(told.values()), told


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers(reentrant):
    plain, model = llama(), llama()
    for each in (plain, model):
        f8sub.attend_in_float8(each, backend="reference", min_length=0)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(losses(plain), losses(model.train()), strict=True))


def test_flash_attention_is_told():
    """Its interface takes packed sequences; the package is for GPUs, so a function of that name stands in."""
    from transformers import AttentionInterface

    plain = AttentionInterface()["sdpa"]
    model = llama()
    f8sub.attend_in_float8(model, backend="reference", min_length=0)
    model.config._attn_implementation = "flash_attention_2"
    known = dict(AttentionInterface._global_mapping)
    AttentionInterface.register("flash_attention_2", lambda *given, **named: plain(*given, **named))
    try:
        losses(model)
    finally:
        AttentionInterface._global_mapping.clear()
        AttentionInterface._global_mapping.update(known)
    report = str(f8sub.conversion_report(model))
    assert "attention: 0 of 2 modules in float8 (2 not: attn_implementation='flash_attention_2'" in report
