"""Models that ``scripts/bench/titan_0_3.py`` measures: their sizes, against transformers', and what arms convert."""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.torch_version import TorchVersion

import f8sub
from f8sub.experts.module import Float8Experts
from tests.integrations.torchtitan.runs import alone
from tests.integrations.torchtitan.test_converter import on_meta

SMALLER = {"llama4": ("--layers", "2"), "deepseek_v3": ("--layers", "3", "--experts", "48")}
SIZES: dict[str, tuple[str, dict[str, int]]] = {
    "llama4": ("Llama4Text", {"num_hidden_layers": 2}),
    "deepseek_v3": (
        "DeepseekV3",
        {"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 48},
    ),
}
"""transformers' class of configs, whose defaults are those of Scout and of the 671B, and what is smaller here."""


def config_of(arm: str, model: str, *options: str) -> Any:
    from scripts.bench import titan_0_3

    with mock.patch.object(sys, "argv", ["titan_0_3", arm, "--model", model, *SMALLER[model], *options]):
        return titan_0_3.config_of(arm, titan_0_3.parsed(), Path("folder"))


def experts_in(model: torch.nn.Module) -> list[Any]:
    """Of each layer that has experts."""
    return [layer.moe for layer in model.layers.values() if layer.moe_enabled]


@alone
@pytest.mark.parametrize("model", SIZES)
def test_models_are_as_large_as_those_of_transformers(model):
    """In the lengths of all vectors and in the elements of all parameters: torchtitan keeps some matrices as one."""
    transformers = pytest.importorskip("transformers")
    kind, smaller = SIZES[model]
    hub = getattr(transformers, f"{kind}Config")(**smaller)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(hub)
    ours = on_meta(config_of("bf16", model).model_spec.model)
    found, expected = (
        sorted(parameter.numel() for parameter in each.parameters() if parameter.dim() == 1)
        for each in (ours, theirs)
    )
    assert found == expected
    found, expected = (sum(parameter.numel() for parameter in each.parameters()) for each in (ours, theirs))
    assert found == expected
    assert {moe.router.top_k for moe in experts_in(ours)} == {hub.num_experts_per_tok}
    assert {len(moe.expert_bias_E) for moe in experts_in(ours)} == {hub.num_local_experts}


@alone
@pytest.mark.parametrize("model", SIZES)
def test_f8sub_converts_experts_and_every_projection_of_attention(model):
    config = config_of('f8sub:{"experts":true}', model, "--experts-on", "2")
    built = on_meta(config.model_spec.model)
    report = f8sub.conversion_report(built)
    left = {fqn for fqn, layer in built.named_modules() if type(layer).__name__ == "Linear"}
    assert {fqn for fqn in left if not fqn.endswith("moe.router.gate")} == {"lm_head"}
    assert {layer.fqn for layer in report.layers if not layer.converted} == left
    for moe in experts_in(built):
        assert isinstance(moe.routed_experts.inner_experts, Float8Experts)
        assert isinstance(moe.shared_experts.w1, f8sub.Float8Linear)
        assert moe.expert_bias_E.dtype == torch.float32
    assert config.parallelism.expert_parallel_degree == 2
    old = torch.__version__ < TorchVersion("2.14")
    assert config.parallelism.spmd_backend == ("partial_dtensor" if old else "spmd_types")


@alone
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("model", SIZES)
def test_torchtitans_own_converters_leave_routers_alone(model, experts):
    pytest.importorskip("torchao")
    from torchtitan.components.quantization import float8

    float8.has_cuda_capability = lambda *_: True
    built = on_meta(config_of('torchao:{"experts":true}' if experts else "torchao", model).model_spec.model)
    left = {fqn for fqn, layer in built.named_modules() if type(layer).__name__ == "Linear"}
    assert {fqn for fqn in left if not fqn.endswith("moe.router.gate")} == {"lm_head"}
    assert len(left) == 1 + len(experts_in(built))
    kinds = {type(moe.routed_experts.inner_experts).__name__ for moe in experts_in(built)}
    assert kinds == {"Float8GroupedExperts" if experts else "GroupedExperts"}
    assert all(
        moe.routed_experts.token_dispatcher.num_experts == len(moe.expert_bias_E) for moe in experts_in(built)
    )
