"""What the estimate reads of recipes and of models."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import f8sub
from f8sub.convert.products import Product, block_of, reads_attention
from f8sub.estimator import gpus, seconds
from f8sub.estimator.bytes import wire
from f8sub.estimator.cluster import Arm, step_of
from f8sub.estimator.estimate import shapes_of
from f8sub.estimator.gpus import (
    B200,
    GPUS,
    H200,
    kind_of_product,
)
from f8sub.estimator.seconds import Run
from tests.estimator.predictions import cluster_of, model, step
from tests.models import Transformer


@pytest.mark.parametrize(
    ("recipe", "kinds"),
    [
        ("tensorwise", [gpus.WHOLE] * 3),
        ("delayed", [gpus.WHOLE] * 3),
        ("rowwise", [gpus.ROWS] * 3),
        ("rowwise_with_gw_hp", [gpus.ROWS, gpus.ROWS, gpus.HIGH]),
        ("blockwise", [gpus.VECTORS_BY_SQUARES, gpus.VECTORS_BY_SQUARES, gpus.VECTORS]),
        ("gridquant", [gpus.SQUARES] * 3),
        ("mxfp8", [gpus.MX] * 3),
        ("nvfp4", [gpus.FP4] * 3),
    ],
)
def test_kinds_of_products(recipe, kinds):
    found = f8sub.get_recipe(recipe)
    assert [kind_of_product(spec) for spec in (found.fprop, found.dgrad, found.wgrad)] == kinds


def test_every_recipe_has_a_kind():
    assert all(kind_of_product(f8sub.get_recipe(name).fprop) != gpus.OTHER for name in f8sub.recipe_names())


def test_tiles_that_no_gpu_multiplies_are_the_references():
    small = f8sub.get_recipe("gridquant", block=48).fprop
    assert kind_of_product(small) == gpus.OTHER
    assert not any(gpu.is_native(small) for gpu in GPUS.values())
    assert H200.rate(small) == H200.rates[gpus.HIGH] / 30


def test_gpus_of_data_sheets_are_marked():
    assert [gpu.name for gpu in GPUS.values() if gpu.measured] == ["H200"]
    assert all("from data sheets" in gpu.source for gpu in GPUS.values() if not gpu.measured)
    assert B200.rates[gpus.MX] == B200.rates[gpus.WHOLE] == B200.rates[gpus.FP4] / 2
    assert GPUS["H100"].rates == H200.rates


PUBLIC_RUNS_ON_8_H100S = {"tensorwise": (1.25, 1.28)}
"""How many times as fast as bf16 a Llama 3 8B trained, that the documentation of torchao and torchtitan have."""


@pytest.mark.parametrize("recipe", PUBLIC_RUNS_ON_8_H100S)
def test_speeds_that_the_documentation_holds_of_h100s(recipe):
    run, shapes = Run(checkpoint="selective"), model("8b", 32)
    plain, own = (step(shapes, each, GPUS["H100"], run) for each in (None, f8sub.get_recipe(recipe)))
    assert all(abs(plain / own / public - 1) <= 0.1 for public in PUBLIC_RUNS_ON_8_H100S[recipe])


def test_attention_of_small_heads_is_slower_a_flop():
    """By the exponentials alone: heads of 64 have twice as many for the same products."""
    shapes = model("1b", 16)
    attended = [p for p in shapes.products if p.reads_attention]
    assert [p.head for p in attended] == [64] * 16
    small = attended[0]
    run = Run(tokens=4096, sequence=4096)
    large = replace(small, head=128)
    more = 4096 * 4096 / 2 * (small.cols / 64 - small.cols / 128) * 2 / seconds.ATTENTION_PASSES
    times = [seconds.attention_seconds(each, H200, run) for each in (small, large)]
    assert times[0] - times[1] == pytest.approx(more / seconds.EXPONENTIALS)
    assert times[1] == pytest.approx(4 * 4096 * 4096 / 2 * small.cols / H200.attention)


def test_a_step_is_no_shorter_than_its_host():
    short, long = Run(tokens=512, sequence=512), Run(checkpoint="none")
    layers = seconds.HOST.block + 7 * seconds.HOST.layer
    for recipe, host in ((None, seconds.HOST.block), (f8sub.get_recipe("rowwise"), layers)):
        found = step_of(model("1b", 16), Arm(recipe), cluster_of(H200, short), short)
        assert found.launched == found.host == pytest.approx(16 * host)
        assert found.replayed < found.launched
        found = step_of(model("8b", 4), Arm(recipe), cluster_of(H200, long), long)
        assert found.launched == found.replayed


def test_what_a_host_takes_for_a_block():
    """Of seven layers, in ms: hosts that were measured, by where the weights lie and what is in float8."""
    block, recipe, run = next(iter(model("8b", 4).blocks.values())), f8sub.get_recipe("tensorwise"), Run()

    def ms(recipe, run=run, **how):
        return 1e3 * seconds.host_seconds(block, recipe, run, **how)

    assert (ms(None), ms(recipe)) == (pytest.approx(9.3), pytest.approx(12.4, abs=0.05))
    assert ms(recipe, gathers=False) / ms(recipe) == pytest.approx(13.0 / 15.2, abs=0.01)
    assert ms(recipe, in_float8=True) - ms(recipe) == pytest.approx(0.25)
    assert (ms(None, parts=2), ms(recipe, parts=2)) == (pytest.approx(16.8), pytest.approx(17.7, abs=0.05))
    alone = replace(run, sharded=False)
    assert (ms(None, alone), ms(recipe, alone)) == (pytest.approx(1.33), pytest.approx(3.39, abs=0.05))
    assert ms(recipe, replace(run, compiled=False)) == 0
    left = [replace(product, reason="asked for") for product in block]
    assert seconds.host_seconds(left, recipe, run) == seconds.host_seconds(block, None, run)


@pytest.mark.parametrize(("changes", "passes"), [({}, 10), ({"clipped": False}, 7)])
def test_what_an_optimizer_moves(changes, passes):
    assert Run(**changes).optimizer_passes == passes


def test_names():
    assert block_of("model.layers.3.mlp.up_proj") == "model.layers.3"
    assert block_of("lm_head") is None
    for name in (
        "model.layers.0.self_attn.o_proj",
        "h.0.attn.c_proj",
        "encoder.attention.dense",
        "layers.0.wo",
    ):
        assert reads_attention(name)
    for name in ("h.0.mlp.c_proj", "layers.0.mlp.dense", "proj", "layers.0.attn.q_proj"):
        assert not reads_attention(name)


def test_shapes_of_a_model():
    model = Transformer(64, 128, blocks=2, classes=1000)
    shapes = shapes_of(model)
    assert shapes.parameters == sum(p.numel() for p in model.parameters())
    assert (list(shapes.blocks), shapes.logits) == (["blocks.0", "blocks.1"], 1000)
    assert [product.fqn for product in shapes.outside] == ["lm_head"]
    block = shapes.blocks["blocks.0"]
    shared = [product.fqn.rpartition(".")[2] for product in block if product.shares_x]
    assert shared == ["k", "v", "up"]
    assert [p.fqn for p in block if p.reads_attention] == ["blocks.0.o"]


def test_what_is_frozen_has_no_wgrad_no_reduction_and_no_optimizer():
    model = Transformer(64, 128, blocks=2, classes=1000)
    learning = shapes_of(model)
    model.requires_grad_(False)
    assert shapes_of(model) == learning  # nothing learns yet, as before adapters are added
    model.lm_head.weight.requires_grad_()
    shapes = shapes_of(model)
    assert shapes.learning == model.lm_head.weight.numel()
    run = Run(shards=2, checkpoint="full")
    for recipe in (None, f8sub.get_recipe("blockwise")):
        for before, product in zip(learning.blocks["blocks.0"], shapes.blocks["blocks.0"], strict=True):
            whole, found = (seconds.linear_seconds(p, recipe, H200, run) for p in (before, product))
            wgrad = (recipe or f8sub.get_recipe("tensorwise").with_high_precision(wgrad=True)).wgrad
            missing = seconds.gemm_seconds(wgrad, before.rows, run.tokens, before.cols, H200)
            assert whole.gemms - found.gemms == pytest.approx(missing)
            assert (found.casts < whole.casts) == (recipe is not None)
        blocks, own = [each.blocks["blocks.0"] for each in (learning, shapes)], recipe is not None
        copied, fixed = (seconds.copy_seconds(block, recipe, H200, run, own=own) for block in blocks)
        elements = sum(product.elements for product in blocks[0])
        copy_in = seconds.UNROUNDED if own else seconds.COPY_IN
        assert copied.copies - fixed.copies == pytest.approx(elements * (copy_in + 8 / 2) / H200.copy)
    assert wire(shapes, None, run).reduced == 4 * shapes.learning / 2
    found = step_of(shapes, Arm(), cluster_of(H200, run), run)
    assert found.optimizer == pytest.approx(shapes.learning / 2 * 4 * 10 / H200.copy)


def test_a_tied_weight_counts_once():
    model = nn.ModuleDict({"embed": nn.Embedding(512, 1024), "lm_head": nn.Linear(1024, 512, bias=False)})
    model["lm_head"].weight = model["embed"].weight
    shapes = shapes_of(model)
    assert (shapes.parameters, shapes.other_parameters) == (512 * 1024, 0)


@pytest.mark.parametrize(
    "order", [("q", "k", "o", "gate", "up", "down"), ("q", "k", "o", "gate", "down", "up")]
)
def test_the_last_product_is_told_by_who_reads_what(order):
    """torchtitan names its w2, which is the last one, before w3."""
    first = {"k": "q", "up": "gate"}
    products = [Product(n, 64, 64, 1, 4096, None, first.get(n, n), n == "o", "0") for n in order]
    assert order[seconds.last_of(products)] == "down"


def test_more_of_everything_takes_longer():
    shapes, recipe = shapes_of(Transformer(2048, 8192, blocks=2, classes=32000)), f8sub.get_recipe("rowwise")

    def timed(**changes):
        usual = {"checkpoint": "none", "tokens": 32768}  # so many that the host is ahead
        return step(shapes, recipe, H200, Run(**{**usual, **changes}))

    assert timed(tokens=65536) > timed()
    assert timed(sequence=16384) > timed()
    assert timed(compiled=False) > timed()
    assert timed(replicas=2) > timed()
    assert timed() < timed(checkpoint="gemms") < timed(checkpoint="selective") < timed(checkpoint="full")


def test_on_meta_and_on_a_cpu_alike():
    with torch.device("meta"):
        on_meta = shapes_of(Transformer(64, 128))
    assert on_meta == shapes_of(Transformer(64, 128))
