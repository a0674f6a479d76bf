"""The training loop, in forked gloo ranks: the same losses however it is run, stopped and resumed."""

import math

import pytest
import torch
from f8sub_pretrain.checkpoint import CheckpointError
from f8sub_pretrain.model import SIZES
from f8sub_pretrain.settings import parse
from f8sub_pretrain.traffic import count_traffic
from pretrain import learning_rate
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import f8sub
from f8sub.torch_compat import gather_in_place
from f8sub.weights import exchange
from tests.models import equal, refusal
from tests.recipes.runs import BLOCKS, changed, losses, quick_settings, records, train, trainer
from tests.selection import long_but
from tests.wire import gathered_bytes

RECIPES = ("", "tensorwise", "nvfp4", "delayed")
QUICK = ("delayed",)
on_each_recipe = pytest.mark.parametrize("recipe", long_but(QUICK, RECIPES), ids=lambda name: name or "bf16")
with_and_without_float8 = pytest.mark.parametrize(
    "recipe", long_but(QUICK, ("", *QUICK)), ids=["bf16", *QUICK]
)


def float8_options(recipe):
    return f"--float8.recipe {recipe}" if recipe else "--float8.enabled false"


def full_weights(rank, world, settings):
    model = trainer(world, settings).model
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {name: value.numpy() for name, value in {**state, **buffers}.items()} if rank == 0 else None


@pytest.mark.long
@pytest.mark.parametrize("size", ["debug", "moe-debug"])
def test_weights_depend_on_the_seed_alone(ranks, tmp_path, size):
    of_size = f"--model.size {size} --float8.experts true"
    plain = quick_settings(tmp_path, f"{of_size} --float8.enabled false")
    options = f"{of_size} --float8.recipe tensorwise --activation_checkpoint.mode full"
    float8 = quick_settings(tmp_path, options)
    one = ranks(1, full_weights, plain)[0]
    three = ranks(3, full_weights, float8)[0]
    assert len(one) > 20
    for name, value in one.items():
        assert (value == three[name]).all(), name
    again = ranks(1, full_weights, changed(plain, "training", seed=1))[0]
    assert (again["lm_head.weight"] != one["lm_head.weight"]).any()


@pytest.mark.parametrize("size", ["debug", pytest.param("moe-debug", marks=pytest.mark.long)])
def test_activation_checkpointing_changes_no_loss(ranks, tmp_path, size):
    found = {}
    for mode in ("none", "selective", "full"):
        options = f"--training.steps 2 --model.size {size} --float8.experts true --activation_checkpoint.mode {mode}"
        settings = quick_settings(tmp_path / mode, options)
        assert ranks(2, train, settings) == [True, True]
        found[mode] = losses(settings)
    assert found["selective"] == found["full"] == found["none"]


@pytest.mark.long
def test_weights_and_buffers_are_those_of_transformers(ranks, tmp_path):
    found = ranks(2, full_weights, quick_settings(tmp_path, "--float8.enabled false"))[0]
    config = LlamaConfig(
        **{**SIZES["debug"], "num_hidden_layers": BLOCKS},
        vocab_size=272,
        max_position_embeddings=32,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    expected = LlamaForCausalLM(config)
    for name, buffer in expected.named_buffers():
        assert (found[name] == buffer.numpy()).all(), name
    for name, weight in expected.state_dict().items():
        assert found[name].shape == tuple(weight.shape)
        assert found[name].std() == pytest.approx(weight.std().item(), rel=0.05), name
        assert found[name].mean() == pytest.approx(weight.mean().item(), abs=0.002), name


IN_FLOAT16 = "--float8.enabled false --training.dtype float16"
IN_BACKGROUND = "--float8.recipe delayed --checkpoint.async_mode async"
GRADIENTS = "--float8.gradients true"


RESUMED = [float8_options("delayed"), IN_FLOAT16, IN_BACKGROUND, GRADIENTS]


@pytest.mark.parametrize("options", long_but(RESUMED[:1], RESUMED))
def test_a_resumed_run_goes_on_bitwise(ranks, tmp_path, options):
    settings = quick_settings(tmp_path, f"{options} --checkpoint.interval 2")
    assert ranks(2, train, settings) == [True, True]
    whole, last = losses(settings), (tmp_path / "checkpoints/step-00000004/__1_0.distcp").read_bytes()
    assert len(whole) == 4
    assert whole[-1] < whole[0] - 0.3
    resumed = changed(settings, "checkpoint", resume="step-00000002")
    assert ranks(2, train, resumed) == [True, True]
    assert losses(settings) == whole
    assert (tmp_path / "checkpoints/step-00000004/__1_0.distcp").read_bytes() == last


@with_and_without_float8
def test_one_rank_and_gradient_accumulation_train_alike(ranks, tmp_path, recipe):
    two = quick_settings(tmp_path / "two", float8_options(recipe))
    options = f"{float8_options(recipe)} --training.gradient_accumulation_steps 2"
    one = quick_settings(tmp_path / "one", options)
    ranks(2, train, two)
    ranks(1, train, one)
    assert losses(one) == pytest.approx(losses(two), rel=2e-2)
    assert losses(one)[-1] < losses(one)[0] - 0.3


def stop_one_rank(rank, world, settings, step):
    run = trainer(world, settings)
    train_step = run.train_step

    def note_then_train():
        run.stop.requested = run.step + 1 == step and rank == world - 1
        return train_step()

    run.train_step = note_then_train
    return run.run(), run.step


@pytest.mark.long
def test_all_ranks_stop_at_the_step_after_the_one_in_which_one_was_asked_to(ranks, tmp_path):
    settings = quick_settings(tmp_path / "stopped", "--float8.enabled false")
    whole = quick_settings(tmp_path / "whole", "--float8.enabled false")
    assert ranks(2, stop_one_rank, settings, 2) == [(False, 3), (False, 3)]
    assert [record["step"] for record in records(settings)] == [1, 2, 3]
    ranks(2, train, changed(settings, "checkpoint", resume="newest"))
    ranks(2, train, whole)
    assert losses(settings) == losses(whole)


def test_a_request_in_the_last_step_changes_nothing(ranks, tmp_path):
    settings = quick_settings(tmp_path, "--float8.enabled false")
    assert ranks(2, stop_one_rank, settings, 4) == [(True, 4), (True, 4)]


@pytest.mark.parametrize("world", [1])
def test_a_new_run_does_not_mix_with_an_older_one(rank, world, tmp_path):
    settings = quick_settings(tmp_path, "--float8.enabled false --checkpoint.interval 4")
    train(rank, world, settings)
    told = refusal(CheckpointError, train, rank, world, settings)
    assert "has checkpoints of an earlier run, up to step-00000004" in told


@pytest.mark.long
@pytest.mark.parametrize("world", [1])
def test_newest_begins_anew_without_checkpoints_but_not_with_broken_ones(rank, world, tmp_path):
    options = "--float8.enabled false --checkpoint.interval 4 --checkpoint.resume newest"
    settings = quick_settings(tmp_path, options)
    assert train(rank, world, settings)
    (tmp_path / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    assert "No checkpoint in" in refusal(CheckpointError, train, rank, world, settings)


def test_metrics_of_steps_after_the_checkpoint_are_written_anew(ranks, tmp_path):
    settings = quick_settings(tmp_path, "--float8.enabled false --checkpoint.interval 3")
    ranks(1, train, settings)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    ranks(1, train, changed(settings, "checkpoint", resume="step-00000003"))
    assert [record["step"] for record in records(settings)] == [1, 2, 3, 4]


@pytest.mark.long
def test_a_run_resumed_from_beyond_its_last_step_ends(ranks, tmp_path):
    settings = quick_settings(tmp_path, "--float8.enabled false --checkpoint.interval 2")
    ranks(1, train, settings)
    shorter = changed(changed(settings, "training", steps=3), "checkpoint", resume="newest")
    # Two steps more at most, should it go on.
    assert ranks(1, stop_one_rank, shorter, 5) == [(True, 4)]


@pytest.mark.long
@pytest.mark.parametrize("world", [1])
def test_tokens_per_second_are_those_of_the_step(rank, world, tmp_path, monkeypatch):
    """Train where step n takes n seconds and an evaluation takes a hundred."""
    settings = quick_settings(tmp_path, "--float8.enabled false --eval.interval 2")
    run = trainer(world, settings)
    seconds = [0.0]
    monkeypatch.setattr("pretrain.time.monotonic", lambda: seconds[0])
    loss = run.loss

    def slow_loss(data):
        seconds[0] += run.step + 1 if run.model.training else 100
        return loss(data)

    run.loss = slow_loss
    run.run()
    found = [record["tokens_per_second"] for record in records(settings) if "loss" in record]
    assert found == [run.tokens_per_step() / step for step in (1, 2, 3, 4)]


def test_float16_skips_a_step_that_overflows_on_one_rank(rank, world, tmp_path):
    """Train with a loss scale that overflows in one rank's gradients alone."""
    settings = quick_settings(tmp_path, "--float8.enabled false --training.dtype float16")
    run = trainer(world, settings)
    before = [parameter.full_tensor().clone() for parameter in run.model.parameters()]
    loss = run.loss
    run.loss = lambda data: loss(data) * (1e30 if rank == 1 else 1.0)
    run.train_step()
    assert equal([parameter.full_tensor() for parameter in run.model.parameters()], before)
    run.loss = loss
    run.train_step()
    assert not torch.equal(next(run.model.parameters()).full_tensor(), before[0])
    assert run.scaler.get_scale() == 2.0**15


@with_and_without_float8
def test_a_loss_that_is_no_number_stops_every_rank(rank, world, tmp_path, recipe):
    run = trainer(world, quick_settings(tmp_path, float8_options(recipe)))
    loss = run.loss
    run.loss = lambda data: loss(data) * (math.nan if rank == 1 else 1.0)
    with pytest.raises(FloatingPointError, match="The loss of step 1 is nan"):
        run.run()


@on_each_recipe
def test_bytes_and_all_reduces_of_a_step(rank, world, tmp_path, recipe):
    """A block is gathered in forward and in backward, what is outside of blocks once."""
    settings = quick_settings(tmp_path, float8_options(recipe))
    run = trainer(world, settings)
    if settings.float8_recipe:
        f8sub.precompute_scales(run.model)
    with count_traffic() as first:
        run.train_step()
    with count_traffic() as second:
        run.train_step()
    blocks = [list(layer.parameters()) for layer in run.model.model.layers]
    in_blocks = {id(parameter): parameter for block in blocks for parameter in block}
    matrices = [tuple(parameter.shape) for parameter in in_blocks.values() if parameter.ndim == 2]
    vectors = sum(parameter.numel() for parameter in in_blocks.values() if parameter.ndim == 1)
    whole = sum(parameter.numel() for parameter in run.model.parameters())
    rest = whole - vectors - sum(map(math.prod, matrices))
    weights = sum(gathered_bytes(recipe, *shape) if recipe else 2 * math.prod(shape) for shape in matrices)
    assert second.all_gather_bytes == 2 * (weights + 2 * vectors) + 2 * rest
    assert second.amax_all_reduces == (1 if recipe else 0)
    assert first.amax_all_reduces == second.amax_all_reduces
    assert first.all_gather_bytes == second.all_gather_bytes


def test_bytes_that_are_gathered_in_place_are_counted(rank, world, tmp_path, monkeypatch):
    """As on GPUs; each block but the first is prefetched."""
    found = []
    for in_place in (False, True):
        if in_place:
            monkeypatch.setattr(
                exchange,
                "gather_in_place",
                lambda weights, takes, casts: gather_in_place(weights, lambda device: True, casts),
            )
        run = trainer(world, quick_settings(tmp_path / str(in_place), float8_options("tensorwise")))
        f8sub.precompute_scales(run.model)
        for _ in range(2):
            with count_traffic() as traffic:
                step = run.train_step()
        found.append((traffic, step.numbers.tolist()))
    assert found[0] == found[1]


@pytest.mark.long
def test_evaluation_is_on_its_own_text_and_changes_nothing(ranks, tmp_path):
    options = "--float8.enabled false --eval.batches 2"
    with_eval = quick_settings(tmp_path / "with", f"{options} --eval.interval 1")
    without = quick_settings(tmp_path / "without", options)
    ranks(2, train, with_eval)
    ranks(2, train, without)
    assert losses(with_eval) == losses(without)
    assert [r["step"] for r in records(with_eval) if "eval_loss" in r] == [1, 2, 3, 4]
    assert len({r["all_gather_bytes"] for r in records(with_eval) if "loss" in r}) == 1


def test_learning_rate_warms_up_and_falls_along_a_cosine():
    options = "--training.steps 110 --lr_scheduler.warmup_steps 10 --optimizer.lr 2.0"
    settings = parse(options.split())
    expected = {0: 0.2, 9: 2.0, 10: 2.0, 60: 2.0 * 0.55, 110: 0.2}
    assert {step: learning_rate(settings, step) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.5, {0: 0.2, 10: 2.0, 50: 2.0, 75: 1.1, 100: 0.2}), (0.0, {10: 2.0, 50: 2.0, 99: 2.0})],
)
def test_the_rate_stays_constant_before_the_decay(ratio, expected):
    options = "--training.steps 100 --lr_scheduler.warmup_steps 10 --optimizer.lr 2.0"
    settings = parse([*options.split(), "--lr_scheduler.decay_ratio", str(ratio)])
    assert {step: learning_rate(settings, step) for step in expected} == pytest.approx(expected)
