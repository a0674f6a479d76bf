"""f8sub in place of torchao: one config, the same numbers; accelerate's fp8 on two ranks; and the way back."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import accelerate_fsdp2
import pytest
import torch
import torchao.float8
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs
from accelerate_fsdp2 import fsdp_plugin
from f8sub_example import Tokens, build_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torchao.float8 import CastConfig, Float8GemmConfig, Float8LinearConfig
from torchao.float8.config import ScalingGranularity

import f8sub
from f8sub.integrations.torchao import take_over
from tests.data_sets import gaussian, generator
from tests.models import BF16, update
from tests.recipes.test_trainers import as_torchrun_would, let_accelerate_shard_on_cpus, recorded

THEIRS = {"convert": torchao.float8.convert_to_float8_training}
"""In a dict, because a name of a module would be replaced."""
TENSORWISE = Float8LinearConfig()
ROWWISE = Float8LinearConfig.from_recipe_name("rowwise")
HIGH_PRECISION_DW = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
E4M3 = CastConfig(target_dtype=torch.float8_e4m3fn)
AXIS = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)


@pytest.fixture
def taken():
    with take_over() as taken:
        yield taken


def linear(config: Float8LinearConfig, call=THEIRS["convert"]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    return call(model, config=replace(config, emulate=True))


def products(model: nn.Module) -> list[torch.Tensor]:
    x = gaussian((32, 64), generator(1)).requires_grad_()
    y = model(x)
    y.backward(gaussian((32, 48), generator(2)))
    return [y.detach(), x.grad, model[0].weight.grad]


CONFIGS = {
    "tensorwise": TENSORWISE,
    "rowwise": ROWWISE,
    "powers of two": replace(TENSORWISE, round_scales_to_power_of_2=True),
    "dy in e4m3": replace(
        TENSORWISE, cast_config_grad_output=E4M3, cast_config_grad_output_for_grad_weight=E4M3
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_means_what_it_means_in_torchao(taken, name):
    """A scale, a dtype or an axis that differs is 1e-2; sums in another order are 1e-6."""
    theirs = products(linear(CONFIGS[name]))
    ours = products(linear(CONFIGS[name], torchao.float8.convert_to_float8_training))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def recipe_of(config: Float8LinearConfig) -> f8sub.Recipe:
    return linear(config, torchao.float8.convert_to_float8_training)[0]._f8sub.plan.recipe


def test_recipes_of_one_name_are_one(taken):
    for name, config in (
        ("tensorwise", replace(TENSORWISE, enable_fsdp_float8_all_gather=True, pad_inner_dim=True)),
        ("rowwise", ROWWISE),
        ("rowwise_with_gw_hp", HIGH_PRECISION_DW),
    ):
        assert recipe_of(config) == f8sub.get_recipe(name)
    fast = Float8GemmConfig(use_fast_accum=True)
    assert recipe_of(replace(TENSORWISE, gemm_config_grad_weight=fast)).wgrad.fast_accum


def test_flags_are_honoured(taken):
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    torchao.float8.convert_to_float8_training(
        model, module_filter_fn=lambda module, fqn: fqn == "1", config=config
    )
    assert type(model[0]) is nn.Linear
    assert model[1]._f8sub.float8_all_gather
    torchao.float8.convert_to_float8_training(model[0])
    assert not model[0]._f8sub.float8_all_gather
    torchao.float8.precompute_float8_dynamic_scale_for_fsdp(model)


def test_the_call_of_axolotl(taken):
    """axolotl/core/fp8.py of 0.19.0: what the YAML file leaves out is None, not False."""
    named = Float8LinearConfig.from_recipe_name("tensorwise")
    config = replace(named, enable_fsdp_float8_all_gather=None, force_recompute_fp8_weight_in_bwd=False)
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 48)))
    asked = []

    def keep_routers(module, fqn):
        """axolotl/monkeypatch/accelerate/float8_moe_filter.py."""
        asked.append(fqn)
        return "gate" not in fqn.split(".")

    torchao.float8.convert_to_float8_training(model, config=config, module_filter_fn=keep_routers)
    assert model[0]._f8sub.plan.recipe == f8sub.get_recipe("tensorwise")
    assert model[0]._f8sub.float8_all_gather is False
    assert {"0", "1.0"} <= {*asked}


def test_the_call_of_nemo_automodel(taken):
    """nemo_automodel/components/quantization/fp8.py of 0.7.0: in place, and it counts layers by class or its name."""
    config = Float8LinearConfig(
        enable_fsdp_float8_all_gather=True, force_recompute_fp8_weight_in_bwd=True, emulate=True
    )
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 50))

    def multiples_of_16(module, name, filter_fqns):
        unlisted = not any(fqn in name for fqn in filter_fqns)
        return unlisted and isinstance(module, nn.Linear) and not any(n % 16 for n in module.weight.shape)

    torchao.float8.convert_to_float8_training(
        model, config=config, module_filter_fn=partial(multiples_of_16, filter_fqns=["lm_head"])
    )
    assert [type(layer).__name__ for layer in model] == ["Float8Linear", "Linear"]
    assert isinstance(model[0], nn.Linear)
    assert model[0]._f8sub.float8_all_gather is True


@dataclass(frozen=True)
class Newer(Float8LinearConfig):
    """A torchao of later has a field that f8sub does not know."""

    hadamard: bool = False


def test_what_has_no_counterpart_is_an_error(taken):
    call = torchao.float8.convert_to_float8_training
    assert linear(Newer(), call)
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"Float8LinearConfig\(hadamard=True\) has no counterpart"
    ):
        linear(Newer(hadamard=True), call)
    with pytest.raises(f8sub.Float8ConfigError, match="dgrad reads the columnwise weight"):
        linear(replace(ROWWISE, round_scales_to_power_of_2=False), call)
    padded = Float8LinearConfig(pad_inner_dim=True)
    with pytest.raises(f8sub.Float8ConfigError, match=r"1: .*pad_inner_dim=True\) fills up 64 -> 50"):
        call(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 50)), config=padded)
    with pytest.warns(f8sub.Float8Warning, match="found nothing to convert"):
        call(nn.Linear(64, 50), module_filter_fn=lambda module, fqn: False, config=padded)


def test_it_is_reversible_and_says_what_it_did(capsys, monkeypatch):
    before = ModuleType("of_a_trainer")
    before.convert = torchao.float8.convert_to_float8_training
    monkeypatch.setitem(sys.modules, before.__name__, before)
    taken = take_over()
    assert taken.places[0] == "of_a_trainer.convert"
    assert "torchao.float8.fsdp_utils.precompute_float8_dynamic_scale_for_fsdp" in taken.places
    assert "f8sub takes the place of of_a_trainer.convert, " in capsys.readouterr().out
    assert before.convert is torchao.float8.convert_to_float8_training is not THEIRS["convert"]
    assert take_over().places == []
    before.late = torchao.float8.convert_to_float8_training
    taken.give_back()
    assert before.convert is before.late is torchao.float8.convert_to_float8_training is THEIRS["convert"]
    assert type(linear(TENSORWISE)[0]).__module__ == "torchao.float8.float8_linear"


RATE, STEPS = 3e-3, 3


def by_accelerate(rank: int, world: int) -> list[float]:
    as_torchrun_would(rank, world)
    take_over()
    let_accelerate_shard_on_cpus()
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp8",
        fsdp_plugin=fsdp_plugin(),
        kwargs_handlers=[AORecipeKwargs(config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))],
    )
    assert accelerator.is_fsdp2
    with recorded(accelerate_fsdp2) as record:
        model = accelerate_fsdp2.build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
        model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(Tokens(), batch_size=8))
        f8sub.precompute_scales(model)
        for _, batch in zip(range(STEPS), data, strict=False):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    block = model.model.layers[1]
    linear = sum(m.weight.numel() for m in block.modules() if isinstance(m, f8sub.Float8Linear))
    others = sum(p.numel() for p in block.parameters()) - linear
    assert record.gathered.count(linear + 2 * others) == 2 * STEPS
    assert record.amax_all_reduces == STEPS + 1
    plain = build_model()
    layers = [fqn for fqn, module in plain.named_modules() if isinstance(module, nn.Linear)]
    # accelerate leaves the first and the last linear layer in high precision.
    f8sub.convert_to_float8(plain, "tensorwise", skip_defaults=False, skip=(layers[0], layers[-1]))
    for block in plain.model.layers:
        fully_shard(block, mp_policy=BF16)
    fully_shard(plain, mp_policy=BF16)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=RATE, fused=True)
    f8sub.precompute_scales(plain)
    losses = []
    for batch in record.batches:
        loss = plain(**batch).loss
        loss.backward()
        update(plain, optimizer)
        losses.append(loss.item())
    assert record.losses == losses
    return losses


@pytest.mark.own_ranks
def test_accelerates_fp8_trains_with_f8sub_as_by_hand(ranks):
    assert len({*ranks(2, by_accelerate)[0]}) == STEPS
