"""The comparison of losses: its statistics against known ones; runs trained here are kept, others' are read."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import f8sub
from f8sub import torch_compat
from scripts import loss_compare
from scripts.bench import pretrain_arm
from scripts.loss_compare import Protocol, Results, Run, arms_of, read_run
from scripts.table import ROOT
from scripts.tables import loss_120m


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (18, 2.1009), (60, 2.0003)]
)
def test_quantiles_of_students_t(degrees, quantile):
    """Against the table of any textbook."""
    assert loss_compare.student_t_quantile(0.975, degrees) == pytest.approx(quantile, abs=1e-4)


def test_a_gap_is_relative_and_seeds_cancel():
    base = [2.0, 3.0, 2.5]
    losses = {"bf16": base, "float32": base, "worse": [1.01 * loss for loss in base]}
    found = loss_compare.gaps(losses)
    assert set(found) == {"float32", "worse"}
    assert found["worse"]["gap_percent"] == pytest.approx(100 * math.log(1.01))
    assert found["float32"]["gap_percent"] == pytest.approx(0)
    assert found["worse"]["half_width_percent"] == pytest.approx(0, abs=1e-9)


def test_two_arms_are_a_paired_t_interval():
    """With one arm beside bf16, the block design is the paired t-test."""
    differences = torch.tensor([0.4, -0.2, 0.7], dtype=torch.float64)
    base = torch.tensor([2.0, 3.0, 2.5], dtype=torch.float64)
    other = base * (differences / 100).exp()
    found = loss_compare.gaps({"bf16": base.tolist(), "other": other.tolist()})["other"]
    assert found["gap_percent"] == pytest.approx(0.3)
    half_width = 4.30265 * differences.std().item() / math.sqrt(3)
    assert found["half_width_percent"] == pytest.approx(half_width, rel=1e-5)
    one_seed = loss_compare.gaps({"bf16": [2.0], "other": [2.1]})["other"]
    assert one_seed == {"gap_percent": pytest.approx(100 * math.log(1.05)), "half_width_percent": None}
    assert loss_compare.interval(one_seed) == "+4.88 %"


def test_arms_differ_in_precision_alone():
    def options(arm: str) -> dict[str, str]:
        words = loss_compare.settings(Run(arm, 1), Protocol(10))
        return dict(zip(words[::2], words[1::2], strict=True))

    precision = {"--float8.enabled", "--float8.recipe", "--training.dtype"}
    bf16, *others = ({**options(arm), **dict.fromkeys(precision)} for arm in ("bf16", "float32", "rowwise"))
    assert others == [bf16] * 2
    assert options("rowwise")["--float8.recipe"] == "rowwise"
    assert options("bf16")["--float8.enabled"] == options("float32")["--float8.enabled"] == "false"
    assert options("torchao-rowwise") == options("bf16")
    experts = loss_compare.settings(Run("rowwise", 1), Protocol(10, "moe-debug"))
    assert experts[experts.index("--float8.experts") + 1] == "true"
    halves = options("bf16-halves")
    assert halves["--float8.enabled"] == "false"
    for name, times in {
        "training.local_batch_size": 0.5,
        "training.gradient_accumulation_steps": 2,
        "eval.batches": 2,
    }.items():
        assert int(halves[f"--{name}"]) == times * int(options("bf16").get(f"--{name}", 1))


@pytest.mark.parametrize("size", loss_compare.SIZES)
def test_every_size_is_one_of_the_trainers(size, monkeypatch):
    monkeypatch.syspath_prepend(str(loss_compare.TRAINER.parent))
    from f8sub_pretrain.settings import parse

    found = parse(loss_compare.settings(Run("rowwise", 1), Protocol(10, size)))
    assert found.model.size == size
    assert found.training.device == ("cpu" if "debug" in size else "auto")


def test_a_finished_run_counts_only_with_the_settings_it_had(tmp_path):
    run = Run("rowwise", 0)
    kept = {
        "settings": loss_compare.settings(run, Protocol(10)),
        "eval_loss": 2.0,
        "losses": [],
        "seconds": 1.0,
    }
    (tmp_path / "rowwise-seed0.json").write_text(json.dumps(kept))
    assert Results(tmp_path, Protocol(10)).load(run) == kept
    assert Results(tmp_path, Protocol(11)).load(run) is None
    assert Results(tmp_path, Protocol(10)).load(Run("rowwise", 1)) is None


@pytest.mark.long
def test_a_run_that_fails_says_why_and_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_compare, "settings", lambda *run: ["--training.steps", "none"])
    results = Results(tmp_path, Protocol(1))
    stopped = tmp_path / "rowwise-seed0" / "checkpoints"
    (stopped / "step-00000001").mkdir(parents=True)
    with pytest.raises(RuntimeError, match=r"rowwise, seed 0.*pretrain\.py(.|\n)*training\.steps"):
        results.train(Run("rowwise", 0), lambda step: None)
    assert results.load(Run("rowwise", 0)) is None
    assert not stopped.exists()


@pytest.mark.long
def test_trains_each_arm_once_and_shows_the_gaps(tmp_path, run_script):
    def run():
        options = (
            "--recipes",
            "rowwise",
            "torchao-rowwise",
            "--seeds",
            "0",
            "--steps",
            "2",
            "--jobs",
            "2",
            "--folder",
            tmp_path,
        )
        finished = run_script("loss_compare.py", *options, OMP_NUM_THREADS="1")
        assert finished.returncode == 0, finished.stderr[-3000:]
        return finished

    assert "rowwise, seed 0" in run().stdout
    assert "float8: torchao's, rowwise" in (tmp_path / "torchao-rowwise-seed0" / "log.txt").read_text()
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*-seed?.json")}
    assert len(written) == 4
    again = run()
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert set(again.figures["gaps"]) == {"float32", "rowwise", "torchao-rowwise"}
    assert all(len(losses) == 1 for losses in again.figures["eval_losses"].values())
    assert loss_compare.interval(again.figures["gaps"]["rowwise"]) in again.stdout
    assert (tmp_path / "loss.png").stat().st_size > 1000


def tensorboard(folder: Path, name: str, losses: dict[int, float]) -> Path:
    """What torchtitan leaves of a run: an event file in a folder that is named by the time."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tb" / "20260101-0000")) as writer:
        for step, loss in losses.items():
            writer.add_scalar(name, loss, step)
            writer.add_scalar("lr", 0.1, step)
    return folder


def lines(file: Path, losses: dict[int, float], held_out: float | None = None) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    records = [{"step": step, "loss": loss, "lr": 0.1} for step, loss in losses.items()]
    if held_out is not None:
        records.append({"step": max(losses), "eval_loss": held_out})
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


LOSSES = {step: 8 - step / 64 for step in range(10, 210, 10)}
"""Float32 has them exactly, as TensorBoard does."""


def test_torchtitans_tensorboard(tmp_path):
    run = read_run(tensorboard(tmp_path, "loss_metrics/global_avg_loss", LOSSES))
    assert run.training == LOSSES
    assert run.held_out is None
    assert run.final == (LOSSES[190] + LOSSES[200]) / 2  # a tenth of 20

    tensorboard(tmp_path, "validation_metrics/loss", {100: 7.0, 200: 6.5})
    run = read_run(tmp_path)
    assert run.training == LOSSES
    assert run.held_out == run.final == 6.5


def test_a_resumed_runs_later_file_counts(tmp_path):
    lines(tmp_path / "1" / "metrics.jsonl", {1: 4.0, 2: 3.0, 3: 2.0})
    lines(tmp_path / "2" / "metrics.jsonl", {3: 1.0, 4: 0.5})
    assert read_run(tmp_path).training == {1: 4.0, 2: 3.0, 3: 1.0, 4: 0.5}
    assert read_run(lines(tmp_path / "by name.json", LOSSES, 6.0)).final == 6.0


def test_a_run_without_losses_is_an_error_that_says_how_to_have_them(tmp_path):
    with pytest.raises(ValueError, match=r"enable_tensorboard"):
        read_run(tensorboard(tmp_path, "loss_metrics/global_max_loss", LOSSES))


def test_arms_that_cannot_be_compared(tmp_path):
    a, b = (str(lines(tmp_path / name, LOSSES)) for name in "ab")
    short = str(lines(tmp_path / "short", {10: 7.0}))
    held_out = str(lines(tmp_path / "held_out", LOSSES, 6.0))
    for given, says in (
        ([["float8", a], ["other", b]], "give bf16"),
        ([["bf16", a]], "at least one other"),
        ([["bf16", a], ["float8", a], ["float8", b]], "each once"),
        ([["bf16", a], ["float8", a, b]], r"'bf16': 1, 'float8': 2"),
        ([["bf16"], ["float8"]], r"'bf16': 0"),
        ([["bf16", a], ["float8", short]], "float8: logged other steps"),
        ([["bf16", a], ["float8", held_out]], "held-out loss"),
    ):
        with pytest.raises(ValueError, match=says):
            arms_of(given, "bf16")


@pytest.mark.long
def test_arms_are_compared_by_the_same_statistics_and_drawn(tmp_path, run_script):
    """Of what torchtitan logs: paired differences of 1, 2 and 3 per cent."""
    options = ["--folder", str(tmp_path)]
    factors = {"bf16": (1.0, 1.0, 1.0), "float8": (1.01, 1.02, 1.03)}
    for arm, of_arm in factors.items():
        options += ["--recorded", arm]
        for seed, factor in enumerate(of_arm):
            losses = {step: loss * factor * (1 + seed / 8) for step, loss in LOSSES.items()}
            folder = tmp_path / f"{arm}_seed{seed}"
            options.append(str(tensorboard(folder, "loss_metrics/global_avg_loss", losses)))
    done = run_script("loss_compare.py", *options)
    assert done.returncode == 0, done.stderr
    expected = loss_compare.gaps({arm: list(of_arm) for arm, of_arm in factors.items()})["float8"]
    assert done.figures["gaps"]["float8"] == pytest.approx(expected, rel=1e-4)
    assert done.figures["steps"] == 200
    assert (tmp_path / "loss.png").stat().st_size > 10_000

    done = run_script("loss_compare.py", *options[:-2])
    assert done.returncode == 2
    assert "runs of each arm" in done.stderr
    assert "Traceback" not in done.stderr


def test_spikes_are_steps_far_above_their_neighbours():
    losses = [2.0 - step / 100 for step in range(60)]
    assert loss_compare.spikes(losses) == 0
    losses[30] *= 1.19
    assert loss_compare.spikes(losses) == 0
    losses[30], losses[45], losses[2] = 2.5, 9.0, 9.0
    assert loss_compare.spikes(losses) == 2


def test_arms_with_a_shared_start_go_on_from_its_checkpoint():
    protocol = Protocol(5, shared_steps=15)

    def options(arm: str) -> dict[str, str]:
        words = loss_compare.settings(Run(arm, 1), protocol)
        return dict(zip(words[::2], words[1::2], strict=True))

    shared, own = options(loss_compare.SHARED), options("tensorwise+fprop")
    assert (shared["--training.steps"], own["--training.steps"]) == ("15", "20")
    assert (shared["--checkpoint.interval"], own["--checkpoint.resume"]) == ("15", "step-00000015")
    assert (shared["--lr_scheduler.decay_ratio"], own["--lr_scheduler.decay_ratio"]) == ("0.0", "0.25")
    assert shared["--float8.enabled"] == "false"
    assert own["--float8.recipe"] == "tensorwise"
    programs = {arm: Path(loss_compare.program(Run(arm, 1), protocol)[0]).name for arm in ARMS}
    assert programs == ARMS


ARMS = {
    "shared": "pretrain.py",
    "bf16": "pretrain_arm.py",
    "tensorwise+fprop": "pretrain_arm.py",
    "bf16-halves": "pretrain.py",
    "tensorwise-head": "pretrain.py",
    "torchao-rowwise": "pretrain_torchao.py",
}


@pytest.mark.parametrize("change", [*pretrain_arm.CHANGES, *pretrain_arm.SKIPPED])
def test_a_changed_arm_converts_and_trains(change):
    recipe, skip, *_ = pretrain_arm.arm_of(f"tensorwise+{change}")
    assert recipe is not None
    assert recipe != f8sub.get_recipe("tensorwise") or skip
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([Block() for _ in range(16)])})})
    f8sub.convert_to_float8(model, recipe, skip=skip)
    converted = {name for name, module in model.named_modules() if isinstance(module, f8sub.Float8Linear)}
    assert converted == {
        f"model.layers.{block}.{layer}"
        for block in range(16)
        for layer in ("self_attn.q_proj", "mlp.up_proj")
        if not (change == "inner_blocks" and block in (0, 15))
        and not (change == "attention" and "mlp" in layer)
        and not (change == "feed_forward" and "attn" in layer)
    }
    x = torch.randn(32, 64, requires_grad=True)
    model["model"]["layers"][1](x).square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({"q_proj": nn.Linear(64, 64)})
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(64, 64)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp["up_proj"](self.self_attn["q_proj"](x))


@pytest.mark.parametrize("operands", ["x", "w", "xw"])
def test_a_forward_pass_is_rounded_in_the_block_alone(operands):
    model = Block()
    attention, mlp = linears(model)
    x, before = torch.randn(32, 64), [layer.weight.detach().clone() for layer in (attention, mlp)]
    with torch.no_grad(), pretrain_arm.rounded(model, operands, of="mlp"):
        found = model(x)
    assert torch.equal(attention.weight, before[0])
    assert torch.equal(mlp.weight, before[1])
    hidden, w = attention(x).detach(), mlp.weight.detach()
    hidden = e4m3(hidden) if "x" in operands else hidden
    w = e4m3(w.bfloat16()).float() if "w" in operands else w
    torch.testing.assert_close(found, F.linear(hidden, w, mlp.bias), rtol=1e-5, atol=1e-5)


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def e4m3(values: torch.Tensor) -> torch.Tensor:
    """Rounded with one scale, by float64."""
    scale = 448 / values.double().abs().max()
    exact = values.double() * scale
    exponent = torch.frexp(exact)[1].clamp(min=-5) - 4
    return (torch.ldexp(torch.ldexp(exact, -exponent).round(), exponent) / scale).to(values.dtype)


def test_an_arm_attends_in_float8():
    arm = pretrain_arm.arm_of("rowwise+attention_forward_in_float8")
    assert arm == pretrain_arm.Arm(f8sub.get_recipe("rowwise"), attention="bf16")


def test_an_arm_ends_in_bf16_in_the_last_part_of_its_own_steps(monkeypatch):
    """Not counting the shared steps, which it is resumed after."""
    monkeypatch.syspath_prepend(str(loss_compare.TRAINER.parent))
    import pretrain
    from f8sub_pretrain import model
    from f8sub_pretrain.settings import parse

    class Trainer:
        settings = parse(["--training.steps", "60"])

        def resume(self) -> None:
            self.step = 40

    monkeypatch.setattr(model, "convert", model.convert)
    for name, until in (("tensorwise+bf16_end", 58), ("tensorwise+bf16_twentieth", 59), ("tensorwise", 0)):
        monkeypatch.setattr(pretrain, "Trainer", Trainer)
        pretrain_arm.install(pretrain_arm.arm_of(name))
        arm = object.__new__(pretrain.Trainer)
        arm.resume()
        assert arm.settings.float8.until_step == until


@pytest.mark.long
def test_an_arm_ends_in_bf16_as_a_run_that_is_resumed_in_bf16(tmp_path):
    """The last tenth of its steps, from its own weights and optimizer: the held-out loss is the same to the bit."""

    def held_out(name: str, options: str) -> float:
        folder = tmp_path / "run"
        chosen = (
            "--model.size debug --training.seq_len 64 --training.local_batch_size 2 --training.steps 10 "
            "--eval.interval 10 --checkpoint.interval 9 --metrics.tensorboard false "
            f"--job.dump_folder {folder} {options}"
        )
        command = [sys.executable, str(ROOT / "scripts" / "bench" / "pretrain_arm.py"), name, *chosen.split()]
        subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [row["eval_loss"] for row in map(json.loads, lines) if "eval_loss" in row][-1]

    ended = held_out("tensorwise+bf16_end", "")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000010")
    assert held_out("bf16", "--checkpoint.resume step-00000009 --float8.enabled false") == ended


def test_an_arm_reduces_gradients_in_place_on_one_rank(monkeypatch):
    """As ``tests/weights/ranks/test_reduce_in_place.py`` has several ranks do."""

    def decide(group: SimpleNamespace) -> None:
        group._reduce_scatter_comm.is_in_place = False

    monkeypatch.setattr(torch_compat, "_reduce_in_place", decide)
    assert pretrain_arm.arm_of("rowwise+unrounded_gradients").unrounded
    assert not pretrain_arm.arm_of("rowwise").unrounded
    with pytest.raises(SystemExit, match="bf16 has none"):
        pretrain_arm.arm_of("bf16+unrounded_gradients")
    group = SimpleNamespace(_reduce_scatter_comm=SimpleNamespace())
    groups = pretrain_arm.reduce_in_place()
    assert groups == []
    torch_compat._reduce_in_place(group)
    assert groups == [group]
    assert group._reduce_scatter_comm.is_in_place


def test_an_arm_codes_gradients_as_the_wire_does():
    assert pretrain_arm.arm_of("tensorwise+gradients_in_float8").codes_gradients
    parameter = nn.Parameter(torch.zeros(3, 100))
    gradient = torch.randn(3, 100) * torch.logspace(-20, 20, 100)
    parameter.grad = gradient.clone()
    pretrain_arm.code_gradient(parameter)
    flat, found = gradient.double().flatten(), []
    for block in flat.split(128):
        # The smallest power of two with which the largest element is at most 416.
        power = 2.0 ** math.ceil(math.log2(block.abs().max() / 416))
        exact = block / power
        step = torch.frexp(exact)[1].clamp(min=-5) - 4
        found.append(torch.ldexp(torch.ldexp(exact, -step).round(), step) * power)
    assert torch.equal(parameter.grad.double().flatten(), torch.cat(found))


def test_an_arm_converts_experts_as_the_settings_say(monkeypatch):
    asked = {}
    monkeypatch.setattr(f8sub, "convert_to_float8", lambda model, **how: asked.update(how))
    settings = SimpleNamespace(
        float8=SimpleNamespace(skip=(), experts=True), training=SimpleNamespace(local_batch_size=2, seq_len=8)
    )
    pretrain_arm.convert(pretrain_arm.arm_of("tensorwise"), nn.Linear(1, 1), settings)
    assert asked["experts"] is True


def test_an_unknown_change_is_an_error():
    with pytest.raises(SystemExit, match=r"no change 'frop'"):
        pretrain_arm.arm_of("tensorwise+frop")


def test_the_tables_of_120m_hold_what_the_runs_say():
    data = json.loads(loss_120m.DATA.read_text())
    found = loss_120m.shared_gaps(data)
    of_default = [
        100 * math.log(run["eval_loss"] / data["arms"]["bf16"][seed]["eval_loss"])
        for seed, run in data["arms"]["tensorwise"].items()
    ]
    assert found["tensorwise"] == pytest.approx(of_default)
    widths = loss_120m.half_widths({"one": [1.0, 3.0], "other": [0.0, 0.0, 0.0]})
    # The pooled variance is 2 / 3, with 3 degrees of freedom.
    assert widths["one"] == pytest.approx(3.18245 * math.sqrt(2 / 3 / 2), rel=1e-5)
    names = "numerics.md", "measurements/numerics.md", "measurements/experts.md"
    pages = [(ROOT / "docs" / page).read_text() for page in names]
    for marker, table in loss_120m.tables(data).items():
        assert (
            f"<!-- begin {marker} -->\n{table.markdown()}\n\n{loss_120m.provenance(data, marker)}\n"
            in "".join(pages)
        )
