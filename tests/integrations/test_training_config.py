"""Float8TrainingConfig: what from_pretrained returns trains as if converted by hand, and saves a plain checkpoint."""

import json

import pytest
import torch
from f8sub_example import Tokens, build_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.quantizers.auto import AutoHfQuantizer

import f8sub
from f8sub.integrations.transformers import Float8Callback, Float8TrainingConfig

STEPS = 3
RATE = 3e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in bf16."""
    folder = tmp_path_factory.mktemp("checkpoint")
    build_model().bfloat16().save_pretrained(folder)
    return folder


def load(folder, config=None, **options):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options)


def test_it_trains_as_by_hand_and_saves_a_plain_checkpoint(folder, tmp_path):
    model = load(folder, Float8TrainingConfig("rowwise"), dtype=torch.float32)
    assert isinstance(model.model.layers[0].mlp.up_proj, f8sub.Float8Linear)
    assert not isinstance(model.lm_head, f8sub.Float8Linear)
    batches, losses = [], []

    def record(module, args, given, output):
        batches.append({name: given[name].clone() for name in ("input_ids", "labels")})
        losses.append(output.loss.item())

    model.register_forward_hook(record, with_kwargs=True)
    options = TrainingArguments(
        str(tmp_path),
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model=model, args=options, train_dataset=Tokens(), callbacks=[Float8Callback()]).train()

    plain = f8sub.convert_to_float8(load(folder, dtype=torch.float32), "rowwise").train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    expected = []
    for batch in batches:
        loss = plain(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(plain)
        expected.append(loss.item())
    assert losses == expected
    assert len(set(losses)) == STEPS

    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    weights = {name: value for name, value in plain.state_dict().items() if name in saved}
    assert saved.keys() == {*load_file(folder / "model.safetensors")}
    assert all(torch.equal(saved[name], weight) for name, weight in weights.items())
    again = load(tmp_path / "saved", dtype=torch.float32)
    assert type(again.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert torch.equal(again.model.layers[0].mlp.up_proj.weight, saved["model.layers.0.mlp.up_proj.weight"])


def test_nothing_on_the_model_says_that_it_is_quantized(folder):
    model, plain = load(folder, Float8TrainingConfig()), load(folder)
    assert vars(model).keys() == vars(f8sub.convert_to_float8(load(folder))).keys()
    assert vars(model.config).keys() == vars(plain.config).keys()
    assert model.config.to_dict() == plain.config.to_dict()
    assert {type(value) for value in model.state_dict().values()} == {torch.Tensor}
    assert AutoHfQuantizer.from_config(Float8TrainingConfig()).is_trainable


def test_a_dict_and_all_options_are_taken(folder):
    config = {"quant_method": "f8sub", "recipe": "rowwise", "skip": ["*.mlp.*"], "skip_defaults": False}
    model = load(folder, config)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert model.lm_head._f8sub.plan.recipe.name == "rowwise"
    told = Float8TrainingConfig("rowwise", filter_fn=lambda module, fqn: True)
    assert "<function" in told.to_json_string()
    assert Float8TrainingConfig.from_dict(config).to_dict() == config


def test_what_is_wrong_is_raised_before_the_weights_are_read(folder, monkeypatch):
    monkeypatch.setattr("transformers.modeling_utils.PreTrainedModel._load_pretrained_model", None)
    for config, told in (
        (Float8TrainingConfig("tensor_wise"), r"unknown recipe 'tensor_wise' \(nearest: tensorwise\)"),
        (Float8TrainingConfig(skp="up"), "has no option 'skp'"),
        (Float8TrainingConfig(skip="*"), "found nothing to convert"),
    ):
        with pytest.raises(f8sub.Float8ConfigError, match=told):
            load(folder, config)


def test_warnings_of_a_conversion_come_once(folder):
    with pytest.warns(f8sub.Float8Warning) as warned:
        load(folder, Float8TrainingConfig(skip="nothing_of_this_name"))
    assert len([w for w in warned if w.category is f8sub.Float8Warning]) == 1
