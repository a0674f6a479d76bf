"""Float8Callback: converts once and reports it; as many steps of scales as of the optimizer, and one hook."""

from unittest import mock

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import f8sub
from f8sub.integrations.transformers import Float8Callback
from f8sub.weights import precompute_scales
from tests.data_sets import gaussian, generator

STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.up(x).square().mean()}


class Fails(TrainerCallback):
    def on_step_end(self, *given: object, **named: object) -> None:
        raise RuntimeError("the disk is full")


def trainer(model: nn.Module, folder, *callbacks: TrainerCallback) -> Trainer:
    data = [{"x": row} for row in gaussian((64, 32), generator(0))]
    options = TrainingArguments(
        str(folder), max_steps=STEPS, report_to="none", use_cpu=True, save_strategy="no"
    )
    return Trainer(model=model, args=options, train_dataset=data, callbacks=list(callbacks))


def trained(model: nn.Module, folder, *callbacks: TrainerCallback) -> torch.Tensor:
    trainer(model, folder, *callbacks).train()
    return model.up.weight.detach().clone()


def test_it_converts_as_by_hand_and_reports_it(tmp_path, capsys):
    by_hand = trained(f8sub.convert_to_float8(Net(), "rowwise"), tmp_path, Float8Callback())
    model = Net()
    weight = model.up.weight
    found = trained(model, tmp_path, Float8Callback("rowwise"))
    assert model.up._f8sub.plan.recipe.name == "rowwise"
    assert model.up.weight is weight  # of an optimizer that exists already
    assert torch.equal(found, by_hand)
    assert not torch.equal(found, trained(Net(), tmp_path, Float8Callback("tensorwise")))
    assert "f8sub: 1 of 1 linear layer" in capsys.readouterr().out


def test_options_are_those_of_the_conversion(tmp_path):
    with pytest.raises(f8sub.Float8ConfigError, match="found nothing to convert: 0 of 1"):
        trainer(Net(), tmp_path, Float8Callback(skip="up"))
    with pytest.raises(
        f8sub.Float8ConfigError, match="already converted with recipe rowwise, asked for tensorwise"
    ):
        trainer(f8sub.convert_to_float8(Net(), "rowwise"), tmp_path, Float8Callback("tensorwise"))


def test_scales_follow_each_step_whatever_was_trained_before(tmp_path):
    model, own = Net(), Float8Callback()
    with pytest.raises(RuntimeError, match="the disk is full"):
        trainer(model, tmp_path, own, Fails()).train()
    training = trainer(model, tmp_path, own)
    with (
        mock.patch.object(f8sub, "precompute_scales") as before,
        mock.patch.object(precompute_scales, "precompute_scales") as after,
    ):
        training.train()
    assert before.call_count == 1
    assert after.call_count == STEPS
    assert not training.optimizer.optimizer._optimizer_step_post_hooks


def test_a_model_that_was_not_converted_is_refused(tmp_path):
    training = trainer(Net(), tmp_path)
    training.add_callback(Float8Callback())
    with pytest.raises(f8sub.Float8ConfigError, match="a Net that was never converted"):
        training.train()
