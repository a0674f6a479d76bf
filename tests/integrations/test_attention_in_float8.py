"""The option attention of trainers: what attends in float8, what checkpoints have, and that a run resumes bitwise."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import hf_trainer
import lightning
import pytest
import torch
import torchao.float8
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from f8sub_example import Tokens, build_model
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Subset
from torchao.float8 import Float8LinearConfig
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import f8sub
from f8sub.convert import attention
from f8sub.integrations import transformers as callback
from f8sub.integrations.accelerate import prepare
from f8sub.integrations.lightning import Float8Callback as LightningCallback
from f8sub.integrations.torchao import take_over
from f8sub.integrations.transformers import Float8Callback, Float8TrainingConfig
from tests.recipes.test_trainers import as_torchrun_would, let_accelerate_shard_on_cpus
from tests.selection import long_but

STEPS = 2
"""Before the checkpoint, and again after it."""
EMULATED: dict[str, Any] = {"attention": "float8", "backend": "reference"}

KINDS: dict[str, dict[str, Any]] = {
    "attention": {"recipe": "rowwise", **EMULATED},
    "delayed": {"recipe": "delayed", "backend": "reference"},
    "both": {"recipe": "delayed", **EMULATED},
}
"""What remembers earlier steps."""
on_each_kind = pytest.mark.parametrize("kind", KINDS)
REMEMBERED = "history", "scaling_states"
"""What names in state dicts have of it."""


@pytest.fixture(autouse=True)
def _of_this_test():
    """Accelerate keeps its state for the process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def states_of(model: nn.Module) -> list[Any]:
    return [each.state for each in f8sub.conversion_report(model).attention]


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights and histories."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in model.state_dict().items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def has_past(model: nn.Module) -> bool:
    """Every module attended in float8 in all steps so far."""
    return all((state.history[: 2 * STEPS] > 0).all() and state.reason is None for state in states_of(model))


def names_in(file: Path) -> set[str]:
    with safe_open(file, "pt") as found:
        return set(found.keys())


def trainer(folder: Path, model: nn.Module, *callbacks: Any, **options: Any) -> Trainer:
    given: dict[str, Any] = {"max_steps": 2 * STEPS, "save_steps": STEPS, "learning_rate": 3e-3, "seed": 0}
    given |= {"per_device_train_batch_size": 4, "lr_scheduler_type": "constant", "disable_tqdm": True}
    arguments = TrainingArguments(str(folder), report_to="none", use_cpu=True, **{**given, **options})
    return Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=list(callbacks))


@pytest.mark.parametrize(
    ("restores", "kind"), long_but([(False, "both")], itertools.product([False, True], KINDS))
)
def test_a_run_of_transformers_resumes_bitwise(tmp_path, restores, kind):
    first = trainer(tmp_path, build_model(), Float8Callback(**KINDS[kind]))
    first.train()
    assert kind == "delayed" or has_past(first.model)
    resumed = trainer(
        tmp_path,
        build_model(),
        Float8Callback(**KINDS[kind]),
        restore_callback_states_from_checkpoint=restores,
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS}"))
    assert resumed.state.global_step == 2 * STEPS
    assert same(trained(first.model), trained(resumed.model))
    # Without what it remembers it is another run.
    file = tmp_path / f"checkpoint-{STEPS}" / "trainer_state.json"
    state = json.loads(file.read_text())
    state["stateful_callbacks"].pop("Float8Callback")
    file.write_text(json.dumps(state))
    other = trainer(tmp_path, build_model(), Float8Callback(**KINDS[kind]))
    other.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS}"))
    assert not same(trained(first.model), trained(other.model))


@on_each_kind
def test_checkpoints_of_transformers_have_weights_that_any_reader_knows(tmp_path, kind):
    model = build_model()
    plain = names_in_a_save(build_model(), tmp_path / "plain")
    trainer(tmp_path, model, Float8Callback(**KINDS[kind])).train()
    model.save_pretrained(tmp_path / "exported")
    for folder in (tmp_path / "exported", tmp_path / f"checkpoint-{STEPS}"):
        assert names_in(folder / "model.safetensors") == plain
        _, told = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(told.values()), told
    # A part of the model is exported so, too, and the state dict of training has all of it.
    model.model.save_pretrained(tmp_path / "part")
    assert not remembered_in(tmp_path / "part")
    assert any(name in key for key in model.state_dict() for name in REMEMBERED)
    # A copy has a list of its own.
    copied = copy.deepcopy(model)
    with f8sub.autocast(recipe=f8sub.get_recipe("delayed", margin=1)):
        copied(input_ids=torch.zeros(1, 16, dtype=torch.int64))
    copied.save_pretrained(tmp_path / "copied")
    assert names_in(tmp_path / "copied" / "model.safetensors") == plain
    if kind == "attention":
        f8sub.save_float8(model, tmp_path / "codes", dtype=torch.float32)
        assert not remembered_in(tmp_path / "codes")


def remembered_in(folder: Path) -> list[str]:
    return [key for key in names_in(folder / "model.safetensors") if any(name in key for name in REMEMBERED)]


def test_a_checkpoint_with_histories_among_its_weights_resumes_bitwise(tmp_path):
    """As they were written before."""
    first = trainer(tmp_path, build_model(), Float8Callback(**KINDS["delayed"]))
    first.model._keys_to_ignore_on_save = set()
    with (
        mock.patch.object(attention, "histories_of", return_value={}),
        mock.patch.object(callback, "histories_of", return_value={}),
    ):
        first.train()
    folder = tmp_path / f"checkpoint-{STEPS}"
    assert remembered_in(folder)
    resumed = trainer(tmp_path, build_model(), Float8Callback(**KINDS["delayed"]))
    resumed.train(resume_from_checkpoint=str(folder))
    assert same(trained(first.model), trained(resumed.model))


def names_in_a_save(model: nn.Module, folder: Path) -> set[str]:
    model.save_pretrained(folder)
    return names_in(folder / "model.safetensors")


def test_a_training_without_the_callback_goes_on_with_it(tmp_path):
    trainer(tmp_path, build_model(), max_steps=STEPS).train()
    model = build_model()
    trainer(tmp_path, model, Float8Callback(**EMULATED)).train(
        resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS}")
    )
    saved = json.loads((tmp_path / f"checkpoint-{2 * STEPS}" / "trainer_state.json").read_text())
    assert len(saved["stateful_callbacks"]["Float8Callback"]["attributes"]["histories"]) == 2


def test_from_pretrained(tmp_path):
    build_model().save_pretrained(tmp_path)
    config = Float8TrainingConfig("rowwise", attention="float8_forward", backend="reference")
    for given in (config, {"quant_method": "f8sub", **config.to_dict()}):
        model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=given)
        assert [state.backward for state in states_of(model)] == ["bf16", "bf16"]
        assert "attention" not in Float8TrainingConfig("rowwise").to_dict()
    # The callback leaves it as it is.
    trainer(tmp_path / "run", model, Float8Callback(), max_steps=1, save_strategy="no").train()
    assert [state.backward for state in states_of(model)] == ["bf16", "bf16"]
    assert all(state.reason is None for state in states_of(model))
    with pytest.raises(
        f8sub.Float8ConfigError, match="already attends in float8 with backward in bf16, asked"
    ):
        trainer(tmp_path / "run", model, Float8Callback(attention="float8"))


class NoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.up(x).square().mean()}


def test_errors_leave_the_model_as_it_was(tmp_path):
    for asked, told in (
        ("fp8", "unknown attention 'fp8'; choose one of"),
        ("float8", "no module whose code"),
    ):
        model = NoAttention()
        with pytest.raises(f8sub.Float8ConfigError, match=told):
            trainer(tmp_path, model, Float8Callback(attention=asked))
        assert type(model.up) is nn.Linear
    with pytest.raises(f8sub.Float8ConfigError, match="unknown attention"):
        Float8TrainingConfig(attention="bf16")
    with pytest.raises(f8sub.Float8ConfigError, match="unknown attention"):
        take_over(attention="bf16")


def batches(first: int = 0) -> DataLoader:
    return DataLoader(Subset(Tokens(), range(4 * first, 64)), batch_size=4)


def test_a_run_of_accelerate_resumes_bitwise(tmp_path):
    def prepared() -> tuple[Any, Any, Any]:
        accelerator = Accelerator(cpu=True)
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        return accelerator, *prepare(accelerator, model, optimizer, recipe="rowwise", **EMULATED)

    def run(accelerator: Any, model: Any, optimizer: Any, steps: range) -> None:
        for _, batch in zip(steps, batches(steps.start), strict=False):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()

    accelerator, model, optimizer = prepared()
    run(accelerator, model, optimizer, range(STEPS))
    accelerator.save_state(str(tmp_path))
    run(accelerator, model, optimizer, range(STEPS, 2 * STEPS))
    assert has_past(model)
    accelerator, resumed, optimizer = prepared()
    accelerator.load_state(str(tmp_path))
    run(accelerator, resumed, optimizer, range(STEPS, 2 * STEPS))
    assert same(trained(model), trained(resumed))


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def fitted(folder: Path, steps: int, **resume: Any) -> tuple[Module, lightning.Trainer]:
    quiet = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")
    runner = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[LightningCallback("rowwise", **EMULATED)],
        **dict.fromkeys(quiet, False),
    )
    module = Module()
    # Lightning goes on with the data from where they begin.
    runner.fit(module, batches(STEPS if resume else 0), **resume)
    return module, runner


def test_a_run_of_lightning_resumes_bitwise(tmp_path):
    _, runner = fitted(tmp_path, STEPS)
    runner.save_checkpoint(tmp_path / "saved.ckpt")
    module, _ = fitted(tmp_path, 2 * STEPS)
    assert has_past(module)
    resumed, _ = fitted(tmp_path, 2 * STEPS, ckpt_path=tmp_path / "saved.ckpt")
    assert same(trained(module), trained(resumed))


def test_in_the_place_of_torchao():
    config = Float8LinearConfig(emulate=True)
    with take_over(attention="float8"):
        model = build_model()
        torchao.float8.convert_to_float8_training(model, config=config)
        assert [(state.backend, state.min_length) for state in states_of(model)] == 2 * [("reference", 0)]
        with pytest.raises(f8sub.Float8ConfigError, match="found no module whose code calls"):
            torchao.float8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config=config)
    with take_over():
        model = build_model()
        torchao.float8.convert_to_float8_training(model, config=config)
        assert states_of(model) == [None, None]


def by_trainer(rank: int, world: int, folder: str, kind: str) -> None:
    as_torchrun_would(rank, world)

    def trainer_of() -> Trainer:
        more = {"max_steps": 2 * STEPS, "save_steps": STEPS, "lr_scheduler_type": "constant"}
        more |= {"use_cpu": not torch.cuda.is_available(), "disable_tqdm": True}
        options = hf_trainer.arguments(folder, **more)
        options.fsdp_config["state_dict_type"] = kind
        options.fsdp_plugin_args["state_dict_type"] = kind
        let_accelerate_shard_on_cpus()
        callback = Float8Callback("delayed", **EMULATED)
        return Trainer(model=build_model(), args=options, train_dataset=Tokens(), callbacks=[callback])

    first, second = trainer_of(), trainer_of()
    first.train()
    assert has_past(first.model)
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS}")
    assert same(trained(first.model), trained(second.model))


@pytest.mark.long
@pytest.mark.own_ranks
@pytest.mark.parametrize("kind", long_but(["SHARDED_STATE_DICT"], ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]))
def test_a_sharded_run_of_transformers_resumes_bitwise(ranks, tmp_path, kind):
    ranks(2, by_trainer, str(tmp_path), kind)
    if kind == "FULL_STATE_DICT":
        assert not remembered_in(tmp_path / f"checkpoint-{STEPS}")
