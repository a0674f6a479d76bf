"""The job as a user starts it: processes, signals, exit codes, and the files that are left."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from f8sub_pretrain import model
from f8sub_pretrain.checkpoint import MANIFEST
from f8sub_pretrain.compare import commands, compare, hardware, noise_of, result, show, smooth, summarize
from f8sub_pretrain.settings import SettingsError, parse
from pretrain import joined_ranks

from tests import namespaces
from tests.namespaces import ROOT
from tests.recipes.runs import QUICK, changed, quick_settings, trainer

SCRIPT = str(ROOT / "recipes" / "pretrain.py")
QUICKLY = QUICK.split()
FIGURES = {
    *("loss_first", "loss", "loss_gap_percent", "loss_gap_noise_percent", "eval_loss", "all_gather_bytes"),
    *("reduced_bytes", "amax_all_reduces", "tokens_per_second", "memory"),
}


def environment(**more):
    return {"CUDA_VISIBLE_DEVICES": "", "HOME": os.environ.get("HOME", "/")} | namespaces.environment(**more)


def start_ranks(world, options):
    """What torchrun does, without an agent that would pass the signal on to every rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = []
    for rank in range(world):
        of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        variables = environment(**meeting, **{name: str(value) for name, value in of_rank.items()})
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": variables}
        processes.append(subprocess.Popen([sys.executable, SCRIPT, *options], **how))
    return processes


def run(*words):
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)


def wait_for_steps(path, count, processes):
    deadline = time.monotonic() + 600
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes), processes[0].communicate()[0]
        time.sleep(0.1)


@pytest.mark.long
def test_a_signal_to_one_rank_saves_and_ends_all_with_0(tmp_path):
    options = ["--float8.recipe", "tensorwise", "--job.dump_folder", str(tmp_path), *QUICKLY[2:]]
    processes = start_ranks(2, [*options, "--training.steps", "100000"])
    try:
        wait_for_steps(tmp_path / "metrics.jsonl", 3, processes)
        processes[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    (saved,) = (tmp_path / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert f"Stopped by a signal after step {step}." in outputs[0]
    assert (saved / MANIFEST).exists()
    again = run(SCRIPT, *options, "--training.steps", str(step + 1), "--checkpoint.resume", "newest")
    assert again.returncode == 0, again.stderr
    assert f"Resumed from {saved}" in again.stdout
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, step + 2))


@pytest.mark.long
def test_compare_under_torchrun_writes_the_plot_and_the_figures(tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = "--training.seq_len 64 --training.steps 14 --training.device cpu --compare bf16 --float8.recipe rowwise"
    folder = f"--job.config_file {ROOT}/recipes/pretrain.toml --job.dump_folder {tmp_path}"
    done = run(*launch, SCRIPT, *folder.split(), *options.split())
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "loss.png") in done.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "summary.json").read_text())
    float8, bf16 = (summary["runs"][name] for name in ("rowwise", "bf16"))
    assert set(summary) == {"runs", "run"}
    assert set(float8) == FIGURES
    about = (summary["run"][name] for name in ("recipe", "steps", "ranks", "device"))
    assert tuple(about) == ("rowwise", 14, 2, "cpu")
    machine, last = done.stdout.strip().splitlines()[-2:]
    assert machine.startswith("This machine: CPU, no float8 units.")
    assert last.startswith("Result: rowwise ends at loss ")
    assert last.endswith("It sent 0.51 of the weight bytes.")
    assert (float8["amax_all_reduces"], bf16["amax_all_reduces"]) == (1, 0)
    assert 0.5 < float8["all_gather_bytes"] / bf16["all_gather_bytes"] < 0.55
    assert float8["reduced_bytes"] == bf16["reduced_bytes"]
    assert max(float8["loss"], bf16["loss"]) < float8["loss_first"] - 1
    assert float8["loss"] != bf16["loss"]
    assert abs(float8["loss_gap_percent"]) < 3
    assert re.search(
        r"bytes all-gathered per step\s+│\s+{:,}".format(float8["all_gather_bytes"]), done.stdout
    )
    assert list((tmp_path / "rowwise" / "tensorboard").iterdir())


@pytest.mark.long
def test_a_single_process_with_compile_and_activation_checkpointing(tmp_path):
    options = ["--job.dump_folder", str(tmp_path), *QUICKLY, "--float8.recipe", "rowwise"]
    done = run(SCRIPT, *options, "--compile.enabled", "true", "--activation_checkpoint.mode", "full")
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--float8.recpie", "rowwise"], 2, "--float8.recpie"),
        (["--data.source", "/no/text"], 1, "rank 0: data.source = '/no/text': no such file or folder"),
        (["--training.device", "cuda"], 1, "and found 0. Start at most one rank per GPU"),
    ],
)
def test_mistakes_end_with_one_message_and_no_traceback(tmp_path, options, code, message):
    done = run(SCRIPT, "--job.dump_folder", str(tmp_path), *options)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_without_a_gpu_where_others_have_one_are_an_error(tmp_path, monkeypatch):
    """With ``device=auto``, too: it would train on the CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    settings = changed(quick_settings(tmp_path), "training", device="auto")
    found = r"device auto needs a GPU for each of this machine's ranks \(2\), and found 1"
    with pytest.raises(SettingsError, match=found), joined_ranks(settings):
        pass


def compared(rank, world, settings):
    compare(settings, lambda one, title: trainer(world, one, title).run())


def test_gradients_by_what_they_are_reduced_in(ranks, tmp_path, capsys):
    """4 bytes an element, 2, and 1 with a scale of 128 of them; losses within the rounding of a few steps."""
    settings = quick_settings(tmp_path, "--compare gradients --float8.enabled false --training.steps 2")
    ranks(2, compared, settings)
    summary = json.loads((tmp_path / "summary.json").read_text())
    runs = summary["runs"]
    assert list(runs) == ["float32", "bfloat16", "float8"]
    sent = [run["reduced_bytes"] for run in runs.values()]
    assert sent[0] == 2 * sent[1] > 0
    assert 1 + 1 / 128 <= sent[2] / (sent[0] / 4) < 1.01
    assert len({run["loss"] for run in runs.values()}) == 3
    assert all(abs(run["loss_gap_percent"]) < 0.5 for run in runs.values())
    assert (tmp_path / "loss.png").exists()
    show(runs, summary["run"], "4 steps")
    cells = r"\s+│\s+".join(f"{size:,.0f}" for size in sent)
    assert re.search(rf"gradient bytes per step\s+│\s+{cells}", capsys.readouterr().out)


def step(number, loss, gathered, reduced=0):
    counted = {"all_gather_bytes": gathered, "reduced_bytes": 4 * gathered, "amax_all_reduces": reduced}
    return {"step": number, "loss": loss, **counted, "tokens_per_second": 10.0 * number, "memory": loss}


def test_figures_leave_out_the_first_step_and_average_the_last_ten_losses():
    float8 = [step(1, 5.5, 999, 7)] + [step(n, 3.0 if n < 12 else 2.0, 100, 1) for n in range(2, 22)]
    bf16 = [step(1, 5.4, 999)] + [step(n, 3.0 if n < 12 else 1.9, 200) for n in range(2, 22)]
    float8.append({"step": 21, "eval_loss": 9.0})
    figures = summarize({"rowwise": float8, "bf16": bf16}, "bf16")
    assert figures["rowwise"] == {
        "loss_first": 5.5,
        "loss": 2.0,
        "loss_gap_percent": pytest.approx(100 * 0.1 / 1.9),
        "loss_gap_noise_percent": None,
        "eval_loss": 9.0,
        "all_gather_bytes": 100,
        "reduced_bytes": 400,
        "amax_all_reduces": 1,
        "tokens_per_second": 115.0,
        "memory": 5.5,
    }
    assert (figures["bf16"]["loss_gap_percent"], figures["bf16"]["eval_loss"]) == (0, None)


def test_the_noise_is_known_for_the_quick_start_alone(tmp_path):
    file = ["--job.config_file", str(ROOT / "recipes" / "pretrain.toml"), "--compare", "bf16"]
    assert noise_of(parse(file)) == 2.1
    assert noise_of(parse([*file, "--float8.recipe", "rowwise"])) == 2.1
    for option in ("--training.steps 200", "--model.size 1b", "--optimizer.lr 1e-4", "--compare gradients"):
        assert noise_of(parse([*file, *option.split()])) is None
    records = {name: [step(n, 2.0, 100) for n in (1, 2)] for name in ("rowwise", "bf16")}
    noises = [run["loss_gap_noise_percent"] for run in summarize(records, "bf16", 2.1).values()]
    assert noises == [2.1, None]


def test_the_result_says_whether_a_gap_is_noise():
    float8 = {"loss": 2.02, "loss_gap_percent": 1.0, "all_gather_bytes": 51}
    bf16 = {"loss": 2.0, "all_gather_bytes": 100, "reduced_bytes": 7}
    said = "Result: rowwise ends at loss 2.020, bf16 at 2.000: +1.0 %{}. It sent 0.51 of the weight bytes."
    for noise, meaning in (
        (2.1, ", within what rounding alone does to one run (± 2.1 %)"),
        (0.4, ", more than what rounding alone does to one run (± 0.4 %)"),
        (None, " with one seed, whose noise is not known (scripts/loss_compare.py takes several)"),
    ):
        figures = {"rowwise": float8 | {"loss_gap_noise_percent": noise}, "bf16": bf16}
        assert result(figures, "bf16") == said.format(meaning)
    # One rank sends nothing.
    alone = {name: of | {"all_gather_bytes": 0, "reduced_bytes": 0} for name, of in figures.items()}
    assert result(alone, "bf16").endswith("takes several).")


@pytest.mark.parametrize(
    ("capability", "words"), [((9, 0), "with float8 units."), ((8, 0), "no float8 units")]
)
def test_the_machine_is_described_in_words(capability, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware().startswith("This machine: CPU, no float8 units.")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert hardware().startswith("This machine: 2 x NVIDIA GPU, ")
    assert words in hardware()


def test_a_smooth_line_is_the_mean_of_the_steps_so_far():
    assert smooth([1.0, 3.0, 5.0]) == [1.0, 2.0, 3.0]
    assert smooth([0.0] * 5 + [1.0] * 20)[-1] == 1.0


def test_the_next_steps_name_what_the_run_wrote(tmp_path, monkeypatch):
    run = tmp_path / "rowwise"
    (run / "checkpoints" / "step-00000014").mkdir(parents=True)
    settings = quick_settings(tmp_path, "--float8.recipe rowwise")
    export = f"python -m f8sub export {run}/checkpoints/step-00000014 {run}/served --recipe rowwise"
    assert commands(settings, run)[2:] == [f"{export}: a checkpoint for inference engines"]
    (run / "numerics_x.png").touch()
    assert commands(settings, run)[2] == f"{run}/numerics_*.png: what float8 did to each layer"

    def exported(changed_settings):
        return "\n".join(commands(changed_settings, run))

    assert f"{export} --skip '*.k_proj':" in exported(changed(settings, "float8", skip=("*.k_proj",)))
    assert f"{export} --no-skip-defaults:" in exported(changed(settings, "float8", skip_defaults=False))
    mixture = changed(settings, "model", size="moe-debug")
    assert f"{export}:" in exported(mixture)
    assert f"{export} --experts:" in exported(changed(mixture, "float8", experts=True))
    # Wide experts, which gain with so many tokens.
    wide = {
        **model.SIZES["moe-debug"],
        "hidden_size": 4096,
        "moe_intermediate_size": 8192,
        "num_hidden_layers": 1,
    }
    monkeypatch.setitem(model.SIZES, "moe-debug", wide)
    assert f"{export} --experts:" in exported(changed(mixture, "training", local_batch_size=512))
    for recipe in ("delayed", "nvfp4"):
        assert "export" not in exported(changed(settings, "float8", recipe=recipe))
    assert len(commands(settings, tmp_path / "none")) == 2
