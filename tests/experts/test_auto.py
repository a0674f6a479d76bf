"""experts="auto", and what reports and estimates say of experts before anything is trained."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import f8sub
from f8sub.convert import convert as conversions
from f8sub.convert.products import GRADIENTS, RESULT, Product
from f8sub.estimator.estimate import shapes_of
from f8sub.estimator.experts import LEAST, LEAST_EXCHANGED, MANY, gain_of
from f8sub.estimator.gpus import B200, H100, H200
from f8sub.experts.module import Float8Experts
from f8sub.experts.seams import EXPERTS
from tests.experts.models import OwnExperts
from tests.models import heard
from tests.selection import of_torchtitan_0_3

PAGES = Path(__file__).parents[2] / "docs"
MIXTRAL = {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
DEEPSEEK = {"first_k_dense_replace": 1, "num_hidden_layers": 2}
KINDS = {"mixtral": MIXTRAL, "qwen3_moe": QWEN, "deepseek_v3": DEEPSEEK, "gpt_oss": {}}


def on_meta(kind: str, **sizes: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    given = {"num_hidden_layers": 2, **KINDS[kind], **sizes}
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(kind, **given), dtype=torch.bfloat16
        )


def weights(experts: int, n: int, k: int) -> list[Product]:
    """Gate, up and down, each token sent to one expert."""
    sizes = {"gate": (n, k, "gate"), "up": (n, k, "gate"), "down": (k, n, "down")}
    return [
        Product(name, rows, cols, 1, experts * n * k, None, reads, False, None, experts=experts)
        for name, (rows, cols, reads) in sizes.items()
    ]


def together(experts: int, n: int, k: int) -> list[Product]:
    """Gate and up as one weight, then down, with SwiGLU in the casts, as transformers has them."""
    up, down = weights(experts, 2 * n, k)[0], weights(experts, n, k)[2]
    return [replace(up, swiglu=GRADIENTS), replace(down, swiglu=RESULT)]


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "tensorwise"])
@pytest.mark.parametrize(("experts", "n", "k"), [(8, 2048, 7168), (16, 8192, 5120), (8, 14336, 4096)])
def test_enough_tokens_are_the_fewest_that_are(experts, n, k, recipe):
    recipe, found = f8sub.get_recipe(recipe), weights(experts, n, k)
    enough = gain_of(found, recipe, H200, None).enough
    assert gain_of(found, recipe, H200, enough * experts).gains
    assert not gain_of(found, recipe, H200, (enough - 1) * experts).gains
    assert gain_of(found, recipe, H200, None).enough_gathered < enough
    speeds = [gain_of(found, recipe, H200, tokens * experts).speedup for tokens in (64, 512, 4096, 32768)]
    assert speeds == sorted(speeds)
    assert speeds[-1] > LEAST > 1 > speeds[0]


def test_the_formula_of_large_weights():
    """Of the page: 6/B over 6/F, 4 (1/N + 1/K)/W and 2E/(MW), a weight's cast included; each term alone."""
    recipe, n, k, experts, tokens = f8sub.get_recipe("blockwise"), 8192, 8192, 16, 16 * 2**20
    rates = {"bf16": 800e12, "codes": 1400e12, "wgrad": 970e12}
    copy, one = 3.8e12, weights(experts, n, k)[:1]
    plain = 6 / rates["bf16"]
    own = 4 / rates["codes"] + 2 / rates["wgrad"] + 4 * (1 / n + 1 / k) / (copy * 0.88)
    written = 2 * (1 / n + 1 / k + experts / tokens) / copy
    expected = (plain + written) / (own + written)
    assert gain_of(one, recipe, H200, tokens).speedup == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("gpu", [H100, H200])
def test_experts_that_were_measured_to_lose_are_left(gpu, recipe):
    """Qwen3-30B-A3B's, by docs/measurements, with as many tokens as a step had, fewer, or an unknown number."""
    products = [weights(128, 1536, 2048)[0], weights(128, 768, 2048)[2]]
    for each in (weights(128, 768, 2048), products):
        assert not any(
            gain_of(each, f8sub.get_recipe(recipe), gpu, tokens).gains for tokens in (131072, 65536, None)
        )


@pytest.mark.parametrize(
    ("sizes", "tokens", "measured"), [((8, 2048, 7168), 32768, 1.32), ((16, 8192, 5120), 16384, 1.19)]
)
def test_experts_that_were_measured_to_gain(sizes, tokens, measured):
    """DeepSeek-V3's and Llama 4 Scout's with ``tensorwise`` on an H100, without SwiGLU's 1.1 and 1.4 ms."""
    found = gain_of(weights(*sizes), f8sub.get_recipe("tensorwise"), H100, tokens)
    assert LEAST <= found.speedup <= measured * 1.03
    assert found.gains


QWEN_STEPS = [
    # recipe, whether weights are gathered as float8 data, speed over bf16 launched and in a CUDA graph
    ("tensorwise", True, (1.35, 1.32)),
    ("rowwise", True, (1.08, 1.07)),
    ("blockwise", True, (1.19, 1.15)),
    ("tensorwise", True, (1.34, 1.28)),
    ("rowwise", True, (1.14, 1.07)),
    ("blockwise", True, (1.17, 1.11)),
    ("tensorwise", False, (1.14, 1.08)),
]
"""Of the experts of Qwen3-30B-A3B with SwiGLU in the casts: docs/measurements/experts.md."""


@pytest.mark.parametrize(("recipe", "gathered", "measured"), QWEN_STEPS)
def test_no_more_is_predicted_than_was_measured_with_swiglu_in_the_casts(recipe, gathered, measured):
    found = gain_of(together(128, 768, 2048), f8sub.get_recipe(recipe), H200, 131072, gathered=gathered)
    assert max(measured) * 0.84 < found.speedup < min(measured) * 1.02
    # By default a job that shards them converts them, and one GPU, which gains less, does not.
    assert found.gains == (gathered and recipe == "tensorwise")
    apart = [replace(product, swiglu="") for product in together(128, 768, 2048)]
    same = gain_of(apart, f8sub.get_recipe(recipe), H200, 131072, gathered=gathered)
    assert same.speedup < found.speedup


def test_experts_on_gpus_of_their_own_have_to_gain_more():
    """Tokens that travel take a step's time in either dtype."""
    shape, recipe = weights(8, 2048, 7168), f8sub.get_recipe("tensorwise")
    plain, exchanged = (gain_of(shape, recipe, H200, None, least=least) for least in (LEAST, LEAST_EXCHANGED))
    assert plain.speedup == exchanged.speedup
    assert plain.enough < exchanged.enough
    assert not gain_of(shape, recipe, H200, 8 * plain.enough, least=LEAST_EXCHANGED).gains
    assert gain_of(shape, recipe, H200, 8 * exchanged.enough, least=LEAST_EXCHANGED).gains


@pytest.mark.parametrize(
    ("options", "ranks", "converted"),
    [
        ({}, 1, False),
        ({}, 4, True),
        ({"float8_all_gather": False}, 4, False),
        ({"experts": "auto_expert_parallel"}, 4, False),
    ],
)
def test_what_gathered_weights_gain_decides_in_a_job_of_several_ranks(options, ranks, converted, monkeypatch):
    monkeypatch.setattr(conversions, "_has_other_ranks", lambda: ranks > 1)
    model = f8sub.convert_to_float8(on_meta("qwen3_moe"), tokens=16384, **options)
    assert all(isinstance(layer.mlp.experts, Float8Experts) == converted for layer in model.model.layers)
    words = "with 1,024 tokens per expert and gathered float8 data"
    report = f8sub.conversion_report(model, tokens=16384)
    assert any(words in line for line in report.experts) == converted


def test_weights_that_nothing_gathers_warn_in_the_first_forward(monkeypatch):
    """A job of several ranks whose weights DDP or nothing shards."""
    monkeypatch.setattr(conversions, "_has_other_ranks", lambda: True)
    model = f8sub.convert_to_float8(on_meta("qwen3_moe"), tokens=16384)
    experts = model.model.layers[0].mlp.experts
    assert experts._f8sub.needed is not None
    assert "gains from" not in repr(experts)
    x = torch.zeros(2 * 1024, 2048, device="meta", dtype=torch.bfloat16)
    gathered = f8sub.quantize(torch.zeros(2, 2048), f8sub.get_recipe("tensorwise").fprop.b)
    with heard() as told:
        for weight in (gathered, torch.zeros(2, 16, 2048)):
            experts._f8sub.needed.compare(x, weight)
    assert len(told) == 1
    assert "experts have 1,024 tokens each in this forward, and tensorwise gains from 1,879 on" in told[0]


def test_a_third_weight_is_one_of_the_weights():
    with pytest.raises(f8sub.Float8ConfigError, match="down='w4' is none of weights"):
        f8sub.register_experts(nn.Linear, weights=("w1", "w2"), down="w4")

    class Experts(OwnExperts):
        """A class of this test alone."""

    # Names that a class does not say are those of each of its modules.
    f8sub.register_experts(Experts, down="w4")
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"down='w4' is none of weights=\('gate', 'up', 'down'\)"
    ):
        f8sub.convert_to_float8(nn.Sequential(Experts(2, 32, 16)), experts=True)


def test_narrow_experts_never_gain():
    gain = gain_of(weights(64, 384, 1024), f8sub.get_recipe("rowwise"), H200, 1e9)
    assert not gain.gains
    assert gain.enough is None
    assert "float8 would not be 1.1 times as fast at any number of tokens" in str(gain)


@pytest.mark.parametrize(("gpu", "recipe"), [(B200, "mxfp8"), (B200, "tensorwise")])
def test_without_a_kernel_for_groups_nothing_is_gained(gpu, recipe):
    """Codes are read as bf16 there."""
    assert gain_of(weights(8, 14336, 4096), f8sub.get_recipe(recipe), gpu, None).speedup < 1
    assert gain_of(weights(8, 14336, 4096), f8sub.get_recipe("rowwise"), B200, None).gains


def test_casts_without_a_kernel_gain_nothing():
    """Those of delayed scaling, for experts, are plain PyTorch."""
    assert not gain_of(weights(8, 14336, 4096), f8sub.get_recipe("delayed"), H200, None).gains


@pytest.mark.parametrize(
    ("tokens", "converted", "words"),
    [
        (
            65536,
            True,
            "with 16,384 tokens per expert (H200); 981 tokens per expert are enough, 620 where FSDP2",
        ),
        (
            1024,
            False,
            "as fast as bf16 with 256 tokens per expert (H200); 981 tokens per expert are enough",
        ),
        (None, True, "gains from 981 tokens per expert, 620 where FSDP2 gathers float8 data (H200)"),
    ],
)
def test_auto_converts_experts_that_gain(tokens, converted, words):
    model = f8sub.convert_to_float8(on_meta("mixtral"), "rowwise", experts="auto", tokens=tokens)
    assert all(isinstance(layer.mlp.experts, Float8Experts) == converted for layer in model.model.layers)
    report = f8sub.conversion_report(model)
    assert words in " ".join(str(report).split())
    assert ('experts: 2 modules stay in high precision: experts="auto"' in report.summary) != converted


def test_auto_leaves_narrow_experts_and_what_cannot_be_converted():
    model = f8sub.convert_to_float8(
        on_meta("qwen3_moe", moe_intermediate_size=384), "rowwise", experts="auto"
    )
    assert (
        "float8 would not be 1.1 times as fast at any number of tokens"
        in f8sub.conversion_report(model).others[0].detail
    )
    model = f8sub.convert_to_float8(
        on_meta("mixtral", intermediate_size=14344), "rowwise", experts="auto", tokens=65536
    )
    assert any("multiples of 16" in other.detail for other in f8sub.conversion_report(model).others)


def test_options_that_there_are_not():
    model = nn.Linear(64, 64)
    for options in ({"experts": "yes"}, {"experts": None}, {"tokens": 0}, {"tokens": 1.5}):
        with pytest.raises(f8sub.Float8ConfigError, match=next(iter(options))):
            f8sub.convert_to_float8(model, **options)
    assert type(model) is nn.Linear


def test_the_pages_say_the_default():
    assert f"the default is `experts={EXPERTS!r}`" in (PAGES / "experts.md").read_text()
    assert f'    experts: bool | str = "{EXPERTS}",\n' in (PAGES / "api.md").read_text()


@pytest.mark.parametrize(
    ("name", "experts", "n", "k"),
    [
        ("Mixtral 8x7B", 8, 14336, 4096),
        ("DeepSeek-V3", 256, 2048, 7168),
        ("gpt-oss", 128, 2880, 2880),
        ("Qwen3-30B-A3B", 128, 768, 2048),
        ("`moe-1b` of `recipes/pretrain.py`", 64, 384, 1024),
    ],
)
def test_the_pages_table(name, experts, n, k):
    """Gate and up are one weight there, as transformers has them."""
    of = together(experts, n, k)
    if name == "gpt-oss":  # has a gate of its own
        of = [replace(product, swiglu="") for product in of]
    gain = gain_of(of, f8sub.get_recipe("tensorwise"), H200, None)
    enough, gathered = (
        "none" if each is None else f"{each:,}" for each in (gain.enough, gain.enough_gathered)
    )
    many = gain_of(of, f8sub.get_recipe("tensorwise"), H200, MANY * experts).speedup
    row = f"| {name}: {n}x{k} | {gain.speedup:.2f} | {many:.2f} | {enough} | {gathered} |\n"
    assert row in (PAGES / "experts.md").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_an_estimate_counts_what_a_conversion_converts(kind):
    """Shares of FLOPs, and bytes on the wire: of experts with one scale each a byte an element, and 4 an expert."""
    model = on_meta(kind)
    found = {
        wanted: f8sub.estimate(model, ["tensorwise"], experts=wanted, mesh=(4,)) for wanted in (True, False)
    }
    f8sub.convert_to_float8(model, "tensorwise", experts=True)
    report = f8sub.conversion_report(model)
    after = f8sub.estimate(model, ["tensorwise"], mesh=(4,))
    assert after.predictions == found[True].predictions
    share = sum(group.flops_share for group in after.groups if group.reason is None)
    assert share == pytest.approx(report.flops_share)
    converted = [other for other in report.others if other.converted]
    elements = sum(other.parameters for other in converted)
    matrices = sum(shape[0] for other in converted for shape in other.shapes)
    saved = found[False].wire.gathered - found[True].wire.gathered
    assert saved == pytest.approx(2 * elements * 3 / 4)
    assert found[True].wire.amaxes - found[False].wire.amaxes == 4 * matrices
    assert (
        found[True].of("H200", "tensorwise").bf16_seconds
        == found[False].of("H200", "tensorwise").bf16_seconds
    )


def test_experts_whose_tiles_reach_over_each_other_are_gathered_in_bf16():
    """2880 rows in blocks of 128, as a converted model says itself."""
    model = on_meta("gpt_oss")
    plain = f8sub.estimate(model, ["blockwise", "rowwise"], gpus=["H200"], experts=False)
    f8sub.convert_to_float8(model, "blockwise", experts=True)
    assert not any(
        m._f8sub.is_gathered(m, name)
        for m in model.modules()
        if isinstance(m, Float8Experts)
        for name in m._f8sub.weights
    )
    found = f8sub.estimate(model, ["blockwise"], gpus=["H200"])
    assert found.wire.gathered == pytest.approx(
        f8sub.estimate(on_meta("gpt_oss"), ["blockwise"], experts=False).wire.gathered
    )
    assert plain.shapes.parameters == found.shapes.parameters


def test_n_k_and_shared_tokens_are_those_of_the_layers():
    found = {p.fqn.rpartition(".")[2]: p for p in shapes_of(on_meta("gpt_oss")).products if p.experts}
    assert [(found[name].rows, found[name].cols) for name in ("gate_up_proj", "down_proj")] == [
        (5760, 2880),
        (2880, 2880),
    ]
    assert all(p.transposed and p.uses == 4 for p in found.values())
    titan = of_torchtitan_0_3("torchtitan.models.common.moe")
    if not hasattr(titan.GroupedExperts, "_grouped_mm"):
        pytest.skip("torchtitan 0.2 has no seam")
    with torch.device("meta"):
        experts = titan.GroupedExperts(titan.GroupedExperts.Config(dim=512, hidden_dim=1024, num_experts=4))
    found = {p.fqn.partition("_")[0]: p for p in shapes_of(experts, experts=True).products}
    assert {name: (p.rows, p.cols) for name, p in found.items()} == {
        "w1": (1024, 512),
        "w2": (512, 1024),
        "w3": (1024, 512),
    }
    assert [name for name, p in found.items() if p.shares_x] == ["w3"]


def test_advice_on_experts():
    few, many = (
        f8sub.estimate(on_meta("mixtral"), ["rowwise"], gpus=["H200"], experts="auto", tokens=tokens)
        for tokens in (2048, 65536)
    )
    assert any('experts="auto": rowwise' in str(group.reason) for group in few.groups)
    assert "Experts have" in few.advice[-1]
    assert "stay in bf16" in few.advice[-1]
    assert 'recipe="rowwise", tokens=65536)' in many.advice[0]
    assert "are in float8" in many.advice[-1]
    assert math.isclose(sum(group.flops_share for group in many.groups), 1)
    assert replace(many.shapes, products=()) == replace(few.shapes, products=())


def test_experts_on_gpus_of_their_own_are_decided_on_as_a_conversion_does():
    """With 1.25 asked for, and weights that each rank casts whole; and what was asked for is what is told."""
    options = {"experts": "auto_expert_parallel", "tokens": 65536}
    model = f8sub.convert_to_float8(on_meta("qwen3_moe"), "tensorwise", **options)
    assert not any(isinstance(module, Float8Experts) for module in model.modules())
    summary = f8sub.conversion_report(model).summary
    said = 'experts="auto_expert_parallel": tensorwise is predicted'
    enough = "8,318 tokens per expert are enough for 1.25"
    assert said in summary
    assert enough in summary
    found = f8sub.estimate(on_meta("qwen3_moe"), ["tensorwise"], gpus=["H200"], **options)
    reasons = [group.reason or "" for group in found.groups if "experts" in group.name]
    assert len(reasons) == 2
    assert all(said in reason and enough in reason for reason in reasons)
    assert "stay in bf16" in found.advice[-1]
    assert enough in found.advice[-1]
    seconds = [
        f8sub.estimate_step(on_meta("qwen3_moe"), 8, gpu="H200", tokens=65536, experts=given)
        .predictions[-1]
        .seconds
        for given in (options["experts"], False, True)
    ]
    assert seconds[0] == seconds[1] != seconds[2]


def test_a_recipe_that_packs_codes_leaves_experts_in_bf16():
    found = f8sub.estimate(on_meta("mixtral"), ["nvfp4"], gpus=["B200"], experts=True)
    rows = {group.name: ratio for group, ratio in zip(found.groups, found.predictions[0].groups, strict=True)}
    assert all(ratio == 1 for name, ratio in rows.items() if "mlp.experts" in name)
