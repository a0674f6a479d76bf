"""The newest axolotl and NeMo AutoModel with f8sub in torchao's place: their own functions convert and train."""

import importlib.util
from unittest import mock

import pytest
import torch
from f8sub_example import Tokens, build_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import f8sub
from f8sub.integrations import one_line, torchao
from f8sub.integrations.transformers import Float8Callback
from tests.models import BF16

STEPS = 3
LAYERS = 14
"""Linear layers of the two blocks of recipes/trainers/f8sub_example.py; the head is one more."""


def in_float8(model: nn.Module) -> list[str]:
    return [fqn for fqn, module in model.named_modules() if isinstance(module, f8sub.Float8Linear)]


def losses_of(model: nn.Module, precompute) -> list[float]:
    for block in model.model.layers:
        fully_shard(block, mp_policy=BF16)
    fully_shard(model, mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    losses = []
    for _, batch in zip(range(STEPS), DataLoader(Tokens(), batch_size=8), strict=False):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        precompute(model)
        losses.append(loss.item())
    return losses


def by_automodel(rank: int, world: int) -> list[float]:
    from nemo_automodel.components.quantization.fp8 import (
        apply_fp8_to_model,
        build_fp8_config,
        verify_fp8_conversion,
    )
    from nemo_automodel.recipes.llm import train_ft

    # After AutoModel has imported torchao's functions by name.
    with f8sub.integrations.torchao.take_over() as taken:
        assert "nemo_automodel.components.quantization.fp8.convert_to_float8_training" in taken.places
        section = {"enabled": True, "recipe_name": "tensorwise", "filter_fqns": ["lm_head"], "emulate": True}
        section |= dict.fromkeys(
            (
                "enable_fsdp_float8_all_gather",
                "precompute_float8_dynamic_scale_for_fsdp",
                "force_recompute_fp8_weight_in_bwd",
            ),
            True,
        )
        model = build_model()
        assert apply_fp8_to_model(model, config=build_fp8_config(section)) is model
        assert model.precompute_float8_dynamic_scale_for_fsdp
        assert verify_fp8_conversion(model)["fp8_count"] == len(in_float8(model)) == LAYERS
        losses = losses_of(model, train_ft.precompute_float8_dynamic_scale_for_fsdp)
    by_hand = f8sub.convert_to_float8(build_model(), "tensorwise", backend="reference")
    assert losses == losses_of(by_hand, f8sub.precompute_scales)
    return losses


@pytest.mark.own_ranks
@pytest.mark.skipif(
    importlib.util.find_spec("nemo_automodel") is None, reason="scripts/test_versions.sh automodel"
)
def test_automodel_trains_as_by_hand(ranks):
    assert len({*ranks(2, by_automodel)[0]}) == STEPS


axolotl = pytest.mark.skipif(
    importlib.util.find_spec("axolotl") is None, reason="scripts/test_versions.sh axolotl"
)
PLUGIN = "f8sub.integrations.axolotl.Float8Plugin"


@pytest.fixture
def given_back():
    yield
    f8sub.integrations.torchao.take_over().give_back()


def axolotls_trainer(folder, save_steps: int = 0, **entries: object):
    from axolotl.cli.config import prepare_plugins
    from axolotl.core.trainers import AxolotlTrainer
    from axolotl.core.training_args import AxolotlTrainingArguments
    from axolotl.integrations.base import PluginManager
    from axolotl.loaders.patch_manager import PatchManager
    from axolotl.utils.dict import DictDefault
    from datasets import Dataset

    config = DictDefault({"fp8": True, "plugins": [PLUGIN], **entries})
    prepare_plugins(config)
    manager = mock.Mock(cfg=config)
    PatchManager._apply_fp8_patches(manager)
    options = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": STEPS,
        "logging_steps": 1,
        "report_to": [],
    }
    options |= {"save_strategy": "steps" if save_steps else "no", "save_steps": max(1, save_steps)}
    options |= {"learning_rate": 3e-3, "remove_unused_columns": False, "lr_scheduler_type": "constant"}
    tokens = Tokens()
    data = Dataset.from_list([{name: t.tolist() for name, t in tokens[i].items()} for i in range(8 * STEPS)])
    trainer = AxolotlTrainer(
        model=build_model(), args=AxolotlTrainingArguments(**options), train_dataset=data
    )
    # What axolotl's TrainerBuilder does with it.
    for callback in PluginManager.get_instance().add_callbacks_post_trainer(config, trainer):
        trainer.add_callback(callback)
    return trainer


@axolotl
def test_axolotls_trainer_has_its_fp8_from_f8sub(tmp_path, given_back):
    trainer = axolotls_trainer(tmp_path, fp8_config={"recipe": "rowwise_with_gw_hp"})
    trainer.train()
    layers = in_float8(trainer.model)
    # accelerate leaves the first and the last linear layer in high precision.
    assert len(layers) == LAYERS - 1
    layer = trainer.model.get_submodule(layers[0])
    assert layer._f8sub.plan.recipe == f8sub.get_recipe("rowwise_with_gw_hp")
    assert not layer._f8sub.float8_all_gather
    assert len({entry["loss"] for entry in trainer.state.log_history if "loss" in entry}) == STEPS
    assert not any(isinstance(each, Float8Callback) for each in trainer.callback_handler.callbacks)
    assert states_of(trainer.model) == [None, None]


def states_of(model: nn.Module) -> list:
    return [each.state for each in f8sub.conversion_report(model).attention]


@axolotl
def test_axolotls_trainer_attends_in_float8_and_resumes_bitwise(tmp_path, given_back):
    # As a config with ``emulate`` would have it, which axolotl's has not.
    with mock.patch.object(
        torchao, "attend_once", lambda model, attention, emulated: emulate(model, attention)
    ):
        first = axolotls_trainer(tmp_path, STEPS - 1, f8sub_attention="float8")
        first.train()
        resumed = axolotls_trainer(tmp_path, f8sub_attention="float8")
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS - 1}"))
    for each in (first, resumed):
        assert [(state.backward, state.reason) for state in states_of(each.model)] == 2 * [("e4m3", None)]
    found, expected = resumed.model.state_dict(), first.model.state_dict()
    assert len([name for name in expected if "history" in name]) == 2
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def emulate(model: nn.Module, attention: str) -> None:
    one_line.attend_once(model, attention, emulated=True)


@axolotl
def test_axolotl_knows_the_plugins_entries(given_back):
    from axolotl.integrations.base import PluginManager, load_plugin
    from axolotl.integrations.config import merge_input_args

    PluginManager.get_instance().register(PLUGIN)
    assert all("f8sub_attention" in each.model_fields for each in merge_input_args())
    plugin = load_plugin(PLUGIN)
    with pytest.raises(f8sub.Float8ConfigError, match="unknown attention 'fp8'; choose one of"):
        plugin.register({"fp8": True, "f8sub_attention": "fp8"})


@axolotl
def test_axolotls_plugin_says_when_it_does_nothing_and_goes_with_a_refused_config():
    import torchao.float8
    from axolotl.integrations.base import load_plugin

    plugin = load_plugin(PLUGIN)
    with pytest.warns(f8sub.Float8Warning, match="found no fp8: true in axolotl's config"):
        plugin.register({"plugins": [PLUGIN]})
    theirs = torchao.float8.convert_to_float8_training
    plugin.register({"fp8": True})
    assert torchao.float8.convert_to_float8_training is not theirs
    plugin.on_config_validation_error({"fp8": True})
    assert torchao.float8.convert_to_float8_training is theirs
