"""What f8sub does inside of torchtitan after 0.3; test_after_0_3.py runs these where the stand-in is found."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchtitan
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.config import OverrideConfig
from torchtitan.config.loader import ConfigLoader
from torchtitan.config.transform import apply_transforms
from torchtitan.models.common.linear import Linear, RowParallelLinear
from torchtitan.models.llama3 import Llama3Model, build_model_config
from torchtitan.trainer import Trainer, batches
from torchtitan_recipes.models.llama3 import llama3_8b
from torchtitan_recipes.tests.models.llama3 import llama3_debugmodel

import f8sub
from f8sub import titan
from f8sub.estimator.models import load
from scripts.tables.api_examples import COMMANDS
from tests.docs.pages import ROOT

STEPS = 3
CONVERTED = [f"layers.{i}.{name}" for i in range(2) for name in ("feed_forward.w2", "wo", "wqkv")]


@pytest.fixture(autouse=True)
def one_rank():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def converted(model: torch.nn.Module) -> list[str]:
    return sorted(fqn for fqn, layer in model.named_modules() if isinstance(layer, f8sub.Float8Linear))


def built(config: Any) -> Any:
    with torch.device("meta"):
        return config.model.build()


def losses_of_a_plain_loop(recipe: str) -> list[float]:
    """The stand-in's model with nn.Linear in the place of its layers, converted, sharded and trained by hand."""
    with torch.device("meta"):
        model = build_model_config("debugmodel").build()
        for fqn, layer in list(model.named_modules()):
            if isinstance(layer, Linear) and layer.num_linears == 1 and fqn != "lm_head":
                linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
                model.set_submodule(fqn, linear)
    f8sub.convert_to_float8(model, recipe, filter_fn=lambda _, fqn: fqn in CONVERTED)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers.values():
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    torch.manual_seed(0)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4, fused=True)
    f8sub.register_precompute_hook(optimizer, model)
    losses = []
    for tokens in batches(STEPS):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(config: Any) -> tuple[Trainer, list[float]]:
    trainer = config.build()
    return trainer, trainer.train(batches(STEPS))


def test_this_is_the_stand_in():
    assert "after_0_3" in torchtitan.__path__[0]


def test_it_has_the_names_of_this_torchtitan_and_says_what_to_take_for_the_others():
    names = set(dir(titan))
    assert names >= {"Float8Transform", "float8", "precompute_scales", "with_float8", "llama3_8b_f8sub"}
    assert not names & {"Float8Converter", "JobConfig", "with_precompute_scales", "llama3_405b_f8sub"}
    for name, of in {"Float8Converter": "0.3", "JobConfig": "0.2", "with_precompute_scales": "0.3"}.items():
        with pytest.raises(f8sub.Float8ConfigError, match=rf"{of}, and 0\.4\.0\.dev0 is .*Float8Transform"):
            getattr(titan, name)
    assert not hasattr(titan, "float9")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_losses_are_bitwise_those_of_a_plain_loop(recipe):
    config = apply_transforms(llama3_debugmodel(), [titan.Float8Transform(recipe_name=recipe)])
    before = Llama3Model.hooks_registered
    trainer, losses = trained(config)
    assert converted(trainer.engine.model_parts[0]) == CONVERTED
    assert Llama3Model.hooks_registered == before + 1
    assert len(trainer.engine.optim.optimizers._optimizer_step_post_hooks) == 1
    assert losses == losses_of_a_plain_loop(recipe)
    assert losses != trained(llama3_debugmodel())[1]


def test_the_config_that_was_given_stays_and_the_tree_of_the_other_is_as_it_was():
    given = llama3_debugmodel()
    config = titan.with_float8(given, recipe_name="rowwise", filter_fqns=["wqkv"])
    assert converted(built(given)) == []
    assert converted(built(config)) == [name for name in CONVERTED if "wqkv" not in name]
    assert config.to_dict()["model"].pop("float8")["recipe_name"] == "rowwise"
    assert [type(each) for _, each, _, _ in config.traverse(Linear.Config)] == [
        type(each) for _, each, _, _ in given.traverse(Linear.Config)
    ]
    again = titan.with_float8(config)
    assert converted(built(again)) == CONVERTED
    assert isinstance(config.model, Llama3Model.Config)


def test_a_models_config_is_changed_in_place():
    config = llama3_debugmodel()
    assert titan.with_float8(config.model) is config.model
    assert converted(built(config)) == CONVERTED


def test_what_stays_is_told_why():
    report = f8sub.conversion_report(built(titan.with_float8(llama3_debugmodel())))
    why = {layer.fqn: layer.detail for layer in report.layers if not layer.converted}
    assert set(why) == {"lm_head", "layers.0.feed_forward.w13", "layers.1.feed_forward.w13"}
    assert "(2, 512, 256), several projections in one" in why["layers.0.feed_forward.w13"]


def test_the_overrides_of_the_command_line_train_the_same():
    module = "torchtitan_recipes.tests.models.llama3"
    given = ["--module", module, "--config", "llama3_debugmodel", "--override"]
    alone = 'f8sub.titan.float8={"recipe_name": "rowwise"}'
    expected = trained(titan.with_float8(llama3_debugmodel(), recipe_name="rowwise"))[1]
    assert trained(ConfigLoader().load([*given, alone]))[1] == expected
    trainer, losses = trained(
        ConfigLoader().load([*given, alone, "--override", "f8sub.titan.precompute_scales"])
    )
    assert losses == expected
    assert len(trainer.engine.optim.optimizers._optimizer_step_post_hooks) == 1
    config = llama3_debugmodel()
    config.override = OverrideConfig(imports=[("f8sub.titan.float8", {"recipe_name": "rowwise"})])
    assert trained(config)[1] == expected
    with pytest.raises(f8sub.Float8ConfigError, match="tensorwize"):
        ConfigLoader().load([*given, 'f8sub.titan.float8={"recipe_name": "tensorwize"}'])


def test_scales_without_float8_are_an_error():
    config = llama3_debugmodel()
    config.override = OverrideConfig(imports=["f8sub.titan.precompute_scales"])
    with pytest.raises(f8sub.Float8ConfigError, match=r"f8sub\.titan\.float8"):
        config.build()


def test_recipes_that_torchtitan_has_are_there_in_float8():
    config = ConfigLoader().load(["--module", "f8sub.titan", "--config", "llama3_8b_f8sub"])
    assert len(converted(built(config))) == 3 * 32
    stock, own = llama3_8b().to_dict(), config.to_dict()
    del own["model"]["float8"]
    assert own == stock
    assert titan.llama3_8b_f8sub.__name__ == "llama3_8b_f8sub"
    assert titan.llama3_70b_f8sub(seq_len=64).model.max_context_length == 64
    with pytest.raises(f8sub.Float8ConfigError, match="llama3_405b in float8, and the one"):
        ConfigLoader().load(["--module", "f8sub.titan", "--config", "llama3_405b_f8sub"])
    with pytest.raises(ValueError, match="llama3_8b_f8sub"):
        ConfigLoader().load(["--module", "f8sub.titan", "--config", "llama3_9b_f8sub"])


def test_the_page_and_the_api_show_what_runs():
    blocks = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "torchtitan.md").read_text(), re.DOTALL)
    (block,) = blocks
    names: dict[str, Any] = {}
    exec(block, names)
    found = converted(built(names["config"]))
    assert found == sorted(
        name for name in converted(built(titan.with_float8(llama3_8b()))) if "layers.0." not in name
    )
    exec(COMMANDS["titan_Float8Transform"].removeprefix("```py\n").removesuffix("```"), names)
    layer = built(names["llama3_8b_rowwise"]()).layers["1"].wo
    assert layer._f8sub.plan.recipe.name == "rowwise"


def test_the_command_line_of_f8sub_finds_recipes():
    assert len(list(load("torchtitan:llama3/llama3_8b").layers.children())) == 32


def test_scales_are_not_made_where_they_are_not_wanted():
    config = titan.with_float8(llama3_debugmodel(), precompute_float8_dynamic_scale_for_fsdp=False)
    with pytest.warns(f8sub.Float8Warning, match="was not called after the weights changed"):
        trainer, _ = trained(config)
    assert not trainer.engine.optim.optimizers._optimizer_step_post_hooks


def test_copies_and_pickles_multiply_in_float8():
    model = built(titan.with_float8(llama3_debugmodel(), emulate=True))
    layer = copy.deepcopy(model).layers["0"].wo.to_empty(device="cpu")
    torch.nn.init.normal_(layer.weight)
    again = pickle.loads(pickle.dumps(layer))
    x = torch.randn(16, 256)
    assert type(again) is type(layer)
    assert torch.equal(again(x), layer(x))
    assert torch.equal(layer(x), f8sub.Float8Linear.forward(layer, x))
    assert not torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight.plain))
    assert converted(f8sub.convert_from_float8(model)) == []
    assert type(model.layers["0"].wo) is RowParallelLinear


def test_a_bias_that_is_a_part_of_a_sum_is_an_error():
    config = llama3_debugmodel()
    for _, each, _, _ in config.traverse(RowParallelLinear.Config):
        each.bias = True
    model = built(titan.with_float8(config, emulate=True)).to_empty(device="cpu")
    with pytest.raises(f8sub.Float8ConfigError, match=r"layers\.0\.wo: its bias .*filter_fqns"):
        model(batches(1)[0])
