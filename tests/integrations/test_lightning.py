"""Float8Callback of Lightning on one process; two ranks of FSDP2 are in tests/recipes/test_trainers.py."""

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import f8sub
from f8sub.integrations.lightning import Float8Callback
from tests.data_sets import gaussian, generator

STEPS = 3


class Module(lightning.LightningModule):
    """Constructs its layers in ``__init__``, or ``late``, in ``configure_model``."""

    def __init__(self, late: bool = False, fails: bool = False) -> None:
        super().__init__()
        self.net: nn.Module | None = None
        self.losses: list[float] = []
        self.fails = fails
        if not late:
            self.build()

    def build(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def configure_model(self) -> None:
        if self.net is None:
            self.build()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        if self.fails and self.losses:
            raise RuntimeError("the disk is full")
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(module: Module, folder, *callbacks: lightning.Callback) -> lightning.Trainer:
    quiet = dict.fromkeys(
        ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False
    )
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        callbacks=[*callbacks],
        **quiet,
    )
    trainer.fit(module, DataLoader(gaussian((64, 32), generator(0)), batch_size=16))
    return trainer


def by_hand(recipe: str) -> list[float]:
    model = f8sub.convert_to_float8(Module(), recipe)
    optimizer = model.configure_optimizers()
    for batch in list(DataLoader(gaussian((64, 32), generator(0)), batch_size=16))[:STEPS]:
        model.training_step(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
    return model.losses


def test_it_is_converting_and_hooking_by_hand(tmp_path, caplog):
    module = Module()
    with caplog.at_level("INFO"):
        trainer = fit(module, tmp_path, Float8Callback("rowwise"))
    assert module.losses == by_hand("rowwise") != by_hand("tensorwise")
    assert "f8sub: 2 of 2 linear layers" in caplog.text
    assert not trainer.optimizers[0]._optimizer_step_post_hooks
    fit(module, tmp_path, Float8Callback("rowwise"))  # again: converted once
    with pytest.raises(
        f8sub.Float8ConfigError, match="already converted with recipe rowwise, asked for tens"
    ):
        fit(module, tmp_path, Float8Callback("tensorwise"))


def test_scales_follow_each_step_and_hooks_go_where_training_fails(tmp_path, monkeypatch):
    calls, callback, module = [], Float8Callback(), Module(fails=True)
    monkeypatch.setattr(
        "f8sub.weights.precompute_scales.precompute_scales", lambda parts: calls.append(parts)
    )
    with pytest.raises(RuntimeError, match="the disk is full"):
        fit(module, tmp_path, callback)
    assert len(calls) == 1
    assert not callback._hooks


def test_layers_that_are_constructed_late_have_to_be_converted_there(tmp_path):
    with pytest.raises(f8sub.Float8ConfigError, match="a Module that was never converted"):
        fit(Module(late=True), tmp_path, Float8Callback())
