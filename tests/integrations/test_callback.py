"""Float8Callback: as many steps of scales as of the optimizer, one hook, and plain words for a plain model."""

from unittest import mock

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import f8sub
from f8sub.integrations import transformers
from f8sub.integrations.transformers import Float8Callback
from f8sub.weights import precompute_scales
from tests.data_sets import gaussian, generator

STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
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


def test_scales_follow_each_step_whatever_was_trained_before(tmp_path):
    model, own = f8sub.convert_to_float8(Net()), Float8Callback()
    with pytest.raises(RuntimeError, match="the disk is full"):
        trainer(model, tmp_path, own, Fails()).train()
    training = trainer(model, tmp_path, own)
    with (
        mock.patch.object(transformers, "precompute_scales") as before,
        mock.patch.object(precompute_scales, "precompute_scales") as after,
    ):
        training.train()
    assert before.call_count == 1
    assert after.call_count == STEPS
    assert not training.optimizer.optimizer._optimizer_step_post_hooks


def test_a_model_that_was_not_converted_is_refused(tmp_path):
    with pytest.raises(f8sub.Float8ConfigError, match="a Net that was never converted"):
        trainer(Net(), tmp_path, Float8Callback()).train()
