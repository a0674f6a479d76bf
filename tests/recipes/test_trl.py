"""TRL in float8: supervised fine-tuning as by hand, and GRPO whose engine has the weights of the training."""

import functools
import importlib.util
import math
from typing import Any

import pytest
import torch
from f8sub_example import build_model

import f8sub

if importlib.util.find_spec("trl") is None:
    pytest.skip(
        "TRL and torchtitan want other datasets: scripts/test_versions.sh trl", allow_module_level=True
    )

import datasets
import trl
import trl_sft_grpo
from f8sub_engine import Engine, digest
from transformers import AutoModelForCausalLM

from f8sub.integrations.transformers import Float8Callback

STEPS = 3
ON_CPU = {"use_cpu": True, "bf16": False}


def test_fine_tuning_has_the_losses_of_a_plain_loop(tmp_path, monkeypatch):
    options = {"lr_scheduler_type": "constant", **ON_CPU}
    trainer = trl_sft_grpo.build_sft(str(tmp_path), STEPS, **options)
    batches: list[dict[str, Any]] = []
    losses = []

    def record(model: Any, args: Any, batch: dict[str, Any], output: Any) -> None:
        batches.append(batch)
        losses.append(output.loss.item())

    trainer.model.register_forward_hook(record, with_kwargs=True)
    trainer.train()
    assert [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] == losses
    # Converted by hand. TRL's trainers give a model a forward of their own, with a fused output head.
    by_hand = f8sub.convert_to_float8(build_model(), "tensorwise")
    monkeypatch.setattr(trl_sft_grpo, "build_model", lambda: by_hand)
    model = trl_sft_grpo.build_sft(str(tmp_path), STEPS, **options).model.train()
    assert model is by_hand
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=trainer.args.learning_rate, weight_decay=0.0, fused=True
    )
    expected = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
        expected.append(loss.item())
    assert losses == expected
    assert len({*losses}) == STEPS


def test_the_engine_of_grpo_has_the_weights_that_training_multiplies(tmp_path):
    engine = Engine()
    trainer = trl_sft_grpo.build_grpo(str(tmp_path), STEPS, engine, **ON_CPU)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    assert len([entry for entry in trainer.state.log_history if "reward" in entry]) == STEPS
    multiplied = {}
    for fqn, layer in trainer.model.named_modules():
        if isinstance(layer, f8sub.Float8Linear):
            assert not torch.equal(layer.weight, before[f"{fqn}.weight"])
            codes = f8sub.quantize(layer.weight, "rowwise", "w", columnwise=False).rowwise
            multiplied[fqn] = digest(codes.data.float() * codes.scale_inv)
    assert len(multiplied) == 14
    assert engine.digests() == multiplied


@pytest.mark.parametrize("reference_in_float8", [False, True])
def test_the_first_loss_of_dpo_is_that_of_equal_models_where_the_reference_is_in_float8_too(
    tmp_path, reference_in_float8
):
    """TRL loads the reference itself, in high precision, so the first KL is that of rounding."""
    build_model().save_pretrained(tmp_path / "model")
    build = functools.partial(AutoModelForCausalLM.from_pretrained, tmp_path / "model")
    rows = [{"prompt": f"{i} ", "chosen": f"{i + 1} {i + 2}", "rejected": f"{i + 3} {i}"} for i in range(16)]
    trainer = trl.DPOTrainer(
        build(),
        ref_model=f8sub.convert_to_float8(build(), "tensorwise") if reference_in_float8 else None,
        args=trl.DPOConfig(str(tmp_path), max_steps=1, **{**trl_sft_grpo.QUIET, **ON_CPU}),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=trl_sft_grpo.build_tokenizer(),
        callbacks=[Float8Callback("tensorwise")],
    )
    trainer.train()
    (loss,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert (loss == pytest.approx(math.log(2), abs=1e-7)) == reference_in_float8
    assert loss == pytest.approx(math.log(2), abs=0.05)
