"""Experts, gradients in float8, a monitor and an export in the training loop, in forked gloo ranks."""

import pytest
import torch
from f8sub_pretrain.metrics import read_metrics
from f8sub_pretrain.settings import SettingsError, parse
from safetensors.torch import load_file
from transformers import AutoConfig

import f8sub
from f8sub.__main__ import main
from tests.recipes.runs import BLOCKS, changed, losses, quick_settings, records, train, trainer
from tests.recipes.test_pretrain_settings import toml
from tests.recipes.test_pretrain_training import GRADIENTS


def test_a_mixture_of_experts(ranks, tmp_path):
    """Its losses are those of bf16 within the rounding of a few steps."""
    settings = quick_settings(tmp_path / "float8", "--model.size moe-debug --float8.experts true")
    bf16 = changed(changed(settings, "float8", enabled=False), "job", dump_folder=str(tmp_path / "bf16"))
    for each in (settings, bf16):
        assert ranks(2, train, each) == [True, True]
    assert losses(settings)[-1] < losses(settings)[0] - 0.3
    assert losses(settings) == pytest.approx(losses(bf16), rel=3e-2)
    ours, of_bf16 = (records(each)[-1]["all_gather_bytes"] for each in (settings, bf16))
    assert ours < 0.55 * of_bf16


@pytest.mark.parametrize(("asked", "backward"), [("float8", "e4m3"), ("float8_forward", "bf16")])
def test_attention_in_float8_is_asked_for(ranks, tmp_path, asked, backward):
    settings = quick_settings(tmp_path, f"--training.steps 2 --float8.attention {asked}")
    assert ranks(2, attention_of, settings) == [[backward] * BLOCKS] * 2


def test_attention_in_float8_goes_on_from_a_run_without(ranks, tmp_path):
    before = quick_settings(tmp_path, "--training.steps 2 --checkpoint.interval 2 --float8.enabled false")
    assert ranks(2, train, before) == [True] * 2
    options = "--training.steps 3 --checkpoint.resume newest --float8.attention float8"
    assert ranks(2, train, quick_settings(tmp_path, options)) == [True] * 2
    assert [record["step"] for record in records(before) if "loss" in record] == [1, 2, 3]


def attention_of(rank, world_size, settings):
    made = trainer(world_size, settings)
    assert made.run()
    return [layer.self_attn.float8_attention.backward for layer in made.model.model.layers]


@pytest.mark.long
def test_a_mixture_whose_experts_stay_in_bf16(ranks, tmp_path):
    sent = []
    # By default, too: they are too narrow to gain.
    for options in ("--float8.experts true", "", "--float8.enabled false"):
        settings = quick_settings(
            tmp_path / str(len(sent)), f"--model.size moe-debug --training.steps 1 {options}"
        )
        assert ranks(2, train, settings) == [True, True]
        sent.append(records(settings)[-1]["all_gather_bytes"])
    assert sent[0] < 0.65 * sent[1] < 0.65 * sent[2]


@pytest.mark.long
def test_gradients_in_float8_are_monitored(ranks, tmp_path):
    settings = quick_settings(tmp_path, f"{GRADIENTS} --float8.monitor_every 2")
    ranks(2, train, settings)
    rows = [row for row in read_metrics(tmp_path / "numerics.jsonl") if row["role"] == "gradient"]
    assert sorted({row["step"] for row in rows}) == [1, 3]
    assert {row["layer"] for row in rows} == {"(root)", *(f"model.layers.{i}" for i in range(BLOCKS))}
    assert (tmp_path / "numerics_gradient.png").exists()


def test_a_monitor_measures_and_changes_nothing(ranks, tmp_path):
    options = "--training.steps 3 --float8.recipe rowwise"
    plain = quick_settings(tmp_path / "plain", options)
    more = "--float8.monitor_every 2 --metrics.tensorboard true"
    watched = quick_settings(tmp_path / "watched", f"{options} {more}")
    for settings in (plain, watched):
        assert ranks(2, train, settings) == [True] * 2
    assert losses(watched) == losses(plain)
    counted = [[r["amax_all_reduces"] for r in records(s)] for s in (plain, watched)]
    assert counted[0] == counted[1]
    rows = read_metrics(tmp_path / "watched" / "numerics.jsonl")
    assert sorted({row["step"] for row in rows}) == [1, 3]
    assert len(rows) == 2 * 3 * 7 * BLOCKS
    assert {row["role"] for row in rows} == {"x", "w", "dy"}
    pictures = sorted(path.name for path in (tmp_path / "watched").glob("*.png"))
    assert pictures == ["numerics_dy.png", "numerics_w.png", "numerics_x.png"]
    assert not list((tmp_path / "plain").glob("numerics*"))


@pytest.mark.long
def test_a_monitors_rows_go_on_after_a_resume(ranks, tmp_path):
    options = "--float8.monitor_every 1 --checkpoint.interval 2 --training.steps"
    assert ranks(1, train, quick_settings(tmp_path, f"{options} 4")) == [True]
    kept = [row for row in read_metrics(tmp_path / "numerics.jsonl") if row["step"] < 3]
    resumed = quick_settings(tmp_path, f"{options} 5 --checkpoint.resume step-00000002")
    assert ranks(1, train, resumed) == [True]
    rows = read_metrics(tmp_path / "numerics.jsonl")
    assert rows[: len(kept)] == kept
    assert list(dict.fromkeys(row["step"] for row in rows)) == [1, 2, 3, 4, 5]


def test_f8sub_export_takes_a_checkpoint_as_it_is(ranks, tmp_path):
    settings = quick_settings(tmp_path / "run", "--checkpoint.interval 4 --float8.recipe blockwise")
    found = ranks(2, train_and_save_float8, settings, str(tmp_path / "own"))
    assert found == [True] * 2
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--recipe", "blockwise"]) == 0
    own, out = (load_file(tmp_path / folder / "model.safetensors") for folder in ("own", "out"))
    assert own.keys() == out.keys()
    assert all(torch.equal(own[k].view(torch.uint8), out[k].view(torch.uint8)) for k in own)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.num_hidden_layers == BLOCKS


def train_and_save_float8(rank, world, settings, folder):
    run = trainer(world, settings)
    done = run.run()
    f8sub.save_float8(run.model, folder)
    return done


def test_experts_that_are_converted(tmp_path):
    for text, expected in (("true", True), ("false", False), ("'auto'", "auto")):
        path = toml(tmp_path, f"[float8]\nexperts = {text}\n")
        word = text.strip("'")
        assert parse(["--job.config_file", path]).float8.experts == expected
        assert parse(["--float8.experts", word]).float8.experts == expected
    with pytest.raises(SettingsError, match=r"experts = 'some': expected bool"):
        parse(["--job.config_file", toml(tmp_path, "[float8]\nexperts = 'some'\n")])
    with pytest.raises(SystemExit):
        parse(["--float8.experts", "some"])
