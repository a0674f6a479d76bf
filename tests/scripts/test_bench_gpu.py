"""The GPU benchmark runs to its end where there is no GPU, says so, and times nothing that is wrong."""

import statistics
import sys
import types

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from f8sub.kernels import reference
from f8sub.kernels.gemm import select
from scripts import bench_gpu
from scripts.bench.gpu import (
    expert_steps,
    gemms,
    graphs,
    linears,
    monitors,
    quantizers,
    slices,
    transformer_engine_layers,
    variants,
)
from scripts.bench.gpu.expert_steps import Variant
from scripts.bench.gpu.experts import FLOOR_DB, RECIPES
from scripts.bench.gpu.session import Session

CPU = torch.device("cpu")
GRAPHED = "f8sub blockwise compiled graphed"
BASELINES = ("bf16 compiled", "bf16 eager", "torchao rowwise_with_gw_hp compiled")
COMPARED = ["f8sub rowwise eager", "f8sub tensorwise eager", "torchao rowwise_with_gw_hp*"]


def session(**changes) -> Session:
    given = {"device": CPU, "tiny": True, "rounds": 2, "shapes": None, "only": []}
    return Session(**{**given, "begin": lambda what: None, "save": lambda: None, **changes})


@pytest.mark.long
def test_every_group_has_figures_of_what_can_run_here(run_script):
    """Tiny ones."""
    finished = run_script("bench_gpu.py", "--rounds", "2", "--only", *COMPARED, GRAPHED)
    assert finished.returncode == 0, finished.stderr[-3000:]
    found, printed = finished.figures, finished.stdout
    assert found["before"]["device"] == found["after"]["device"] == "CPU"
    assert found["failed"] == {}
    assert printed.count(", CPU") >= 7
    figures = found["figures"]
    assert set(figures) == {"quantize", "gemm", "linear", "experts", "experts_casts", "slice", "monitor"}
    for rows in figures["quantize"].values():
        named = ("1x128 both", "columns of rowwise codes", "amaxes and scales of shards 128x128")
        assert rows.keys() >= {"copy", "256x256 column", *named}
        assert rows["copy"]["of_copy"] == 1.0
        assert all(row["median_ms"] > 0 and row["gb_per_s"] > 0 for row in rows.values())
    kinds = {
        f"{kind}, {backend}"
        for kind, (a, b, _) in gemms.KINDS.items()
        for backend, module in select.GEMM.items()
        if backend != "reference" and module.why_not(a, b, CPU) is None
    }
    for rows in figures["gemm"]["products"].values():
        assert rows.keys() == {"bf16", *kinds}
        assert all(row["tflops"] > 0 and row["sqnr_db"] > gemms.FLOOR_DB for row in rows.values())
    experts = figures["experts"]
    for rows in experts["products"].values():
        assert {name.partition(",")[0] for name in rows} == {"bf16", *RECIPES}
        assert all(row["sqnr_db"] > FLOOR_DB for name, row in rows.items() if name != "bf16")
    for rows in experts["steps"].values():
        assert rows.keys() == {"bf16 compiled", "bf16 eager", *COMPARED[:2]}
    (layers,), (steps,) = figures["linear"]["layers"].values(), figures["slice"]["tokens"].values()
    assert set(layers) == set(steps) == {*BASELINES, *COMPARED[:2]}
    assert all(20 < layers[name]["sqnr_db"]["dx"] < 40 for name in COMPARED[:2])
    for row in steps.values():
        assert row["step"]["tokens_per_s"] == pytest.approx(32e3 / row["step"]["median_ms"])
        assert row["check"]["loss"] == pytest.approx(steps["bf16 compiled"]["check"]["loss"], rel=0.05)
    graphed = {f"{name} graphed" for name in BASELINES} | {GRAPHED}
    assert figures["slice"]["graphed"] == {}
    assert figures["slice"]["skipped"] == dict.fromkeys(graphed, "a CUDA graph needs a CUDA device")
    assert GRAPHED in printed


@pytest.mark.long
def test_patterns_name_what_the_asked_groups_have(run_script):
    gathered = "f8sub rowwise gathered eager"
    of_experts, of_steps = bench_gpu.names_of(["experts"]), bench_gpu.names_of(["slice"])
    assert set(bench_gpu.names_of(["slice", "experts"])) == {*of_experts, *of_steps}
    assert {gathered, GRAPHED} & set(of_experts) == {gathered}
    assert {gathered, GRAPHED} & set(of_steps) == {GRAPHED}
    chosen, _ = variants.chosen([gathered], CPU)  # by experts alone
    assert {variant.library for variant in chosen} == {variants.BF16}
    refused = run_script("bench_gpu.py", "--group", "slice", "--only", "bf16*", gathered)
    assert refused.returncode == 2
    assert f"--only {gathered!r} matches none of ['bf16 compiled'" in refused.stderr


@pytest.mark.parametrize(
    ("library", "module"),
    [("torchao", "torchao.float8"), ("TransformerEngine", "transformer_engine.pytorch")],
)
def test_a_library_that_is_missing_is_left_out_with_a_sentence(monkeypatch, library, module):
    monkeypatch.setitem(sys.modules, module, None)
    for of_layers in (True, False):
        chosen, skipped = variants.chosen([f"{library} *"], CPU, of_layers=of_layers)
        assert {variant.library for variant in chosen} == {variants.BF16}
        reasons = {reason for name, reason in skipped.items() if name.startswith(library)}
        missing = {reason for reason in reasons if reason.startswith(f"{library} cannot be imported: ")}
        assert len(missing) == 1
        assert reasons - missing <= {"a CUDA graph needs a CUDA device"}


def test_transformer_engine_is_of_one_layer_eagerly_and_of_plain_blocks_of_one_rank(monkeypatch):
    monkeypatch.setattr(transformer_engine_layers, "why_not", lambda device: None)
    asked = [variants.BF16, "TransformerEngine *"]
    layers, _ = variants.chosen(asked, CPU, of_layers=True)
    names = [variant.name for variant in layers if variant.library == variants.TRANSFORMER_ENGINE]
    assert names == [f"TransformerEngine {recipe} scaling eager" for recipe in ("current", "delayed")]
    of_blocks, _ = variants.chosen(asked, CPU)
    for how in ({"ranks": 2}, {"checkpoint": "full"}, {}):
        left_out = [v for v in of_blocks if slices.why_not(v, session(**how)) is not None]
        assert {v.library for v in left_out} == ({variants.TRANSFORMER_ENGINE} if how else set())
        assert len(left_out) == (4 if how else 0)


def test_attention_between_transformer_engines_modules_is_that_of_other_blocks():
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa"
    )
    attention = LlamaAttention(config, layer_idx=0)
    x = torch.randn(1, 24, 64)
    positions = LlamaRotaryEmbedding(config)(x, torch.arange(24)[None])
    qkv = torch.cat([layer(x) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)], dim=-1)
    found = attention.o_proj(transformer_engine_layers.attend(qkv, *positions, 4, 2))
    torch.testing.assert_close(found, attention(x, positions)[0])


def test_steps_are_compared_round_by_round():
    """With the bf16 variant whose median is the least."""
    given = {"bf16 eager": [4.0, 2.0, 4.0], "bf16 compiled": [3.0, 3.0, 3.0], "f8sub": [2.0, 1.5, 1.0]}
    rows = {
        name: {"median_ms": statistics.median(times), "rounds_ms": times} for name, times in given.items()
    }
    expert_steps.compare(rows)
    assert [row["over_bf16"] for row in rows.values()] == [0.75, 1.0, 2.0]
    assert rows["f8sub"]["over_bf16_quartiles"] == [1.5, 2.0, 3.0]


def test_gathered_experts_step_with_codes():
    """Those that FSDP2 gathered: the step casts no weight."""
    experts = Variant("f8sub", recipe="rowwise", backend="auto", gathered=True).made((2, 64, 32), CPU)
    assert len(list(experts.parameters())) == 3
    for weight in experts.parameters():
        codes = weight.__tensor_flatten__()[0]
        assert weight.dtype == torch.bfloat16
        assert torch.float8_e4m3fn in {getattr(weight, name).dtype for name in codes}


def test_what_computes_something_wrong_is_not_timed():
    format = quantizers.FORMATS["tensorwise"]
    quantize = quantizers.quantizer_of(reference.quantize, (format, format))
    x = torch.randn(16, 32)
    quantizers.check(quantizers.Bench("right", quantize, quantize, 4.0), x)
    with pytest.raises(RuntimeError, match="wrong of"):
        quantizers.check(quantizers.Bench("wrong", lambda x: quantize(x * 1.5), quantize, 4.0), x)

    variant = variants.Variant("f8sub", "rowwise", False)
    layer = linears.Layer(variant, 32, 48, CPU)
    given = x.bfloat16().requires_grad_(), torch.randn(16, 48).bfloat16()
    right = linears.right_of(given, 48)
    assert set(linears.check(layer, given, right)) == {"y", "dx", "dw"}
    with pytest.raises(RuntimeError, match="f8sub rowwise eager"):
        linears.check(layer, given, (*right[:2], right[2].flip(0)))

    trainer = types.SimpleNamespace(variant=variant, blocks=4, clear=lambda: None)
    weights = {"first": torch.randn(8, 8), "last": torch.randn(8, 8)}
    trainer.loss_and_gradients = lambda batch: torch.tensor(6.0)
    trainer.gradients = lambda: {name: weight * 1.01 for name, weight in weights.items()}
    assert slices.check(trainer, None, (6.1, weights))["first"] == pytest.approx(40, abs=0.1)
    with pytest.raises(RuntimeError, match="first loss"):
        slices.check(trainer, None, (6.6, weights))
    with pytest.raises(RuntimeError, match="gradients"):
        slices.check(trainer, None, (6.0, {**weights, "last": weights["first"]}))

    launched, replayed, again = [6.0, 5.5, 5.0], [6.0, 5.5, 5.01], [6.0, 5.5, 5.001]
    assert graphs.compare(replayed, launched, again)["error"] == pytest.approx(0.01)
    for wrong, twice in ((replayed, launched), ([6.0, 5.5, 5.1], again), ([6.0, 5.5, float("nan")], again)):
        with pytest.raises(RuntimeError, match="losses of replayed steps"):
            graphs.compare(wrong, launched, twice)


def test_what_raises_is_told_and_the_next_goes_on_unless_there_are_other_ranks():
    """Those would be in collectives in which this one is not."""
    run, several = session(), session(ranks=2)
    with run.attempt("one"):
        raise ValueError("broken")
    assert run.failed == {"one": "ValueError: broken"}
    with pytest.raises(RuntimeError, match="ValueError: wrong"), several.attempt("this"):
        raise ValueError("wrong")


def test_the_weight_is_cast_before_every_call():
    """Codes are kept until a weight changes; a benchmark that left that out would time less than a step."""
    layer = linears.Layer(variants.Variant("f8sub", "tensorwise", False), 32, 48, CPU)
    given = torch.randn(16, 32).bfloat16().requires_grad_(), torch.randn(16, 48).bfloat16()

    def operators() -> int:
        with torch.profiler.profile() as profile:
            layer.step(given)
        return len(profile.events())

    layer.step(given)
    kept = operators()
    layer.changed()
    assert operators() > kept


def test_a_monitors_cost_is_that_of_sampled_steps():
    given = session(only=["f8sub tensorwise eager"])
    monitors.group(given)
    assert not given.failed
    ((shape, rows),) = given.figures["monitor"].items()
    (row,) = rows.values()
    assert (shape, row["operands"]) == ("32x4", 3 * 4 * 7)
    plain, sampled = row["plain"]["median_ms"], row["sampled"]["median_ms"]
    assert row["share"] == pytest.approx((sampled - plain) / (100 * plain))
    assert len(given.tables) == 1
