"""The loss of every recipe against bf16: the held-out loss of the same runs, over several seeds.

An arm is bf16, float32, a recipe, one of torchao's, or with ``--head`` or ``--swiglu`` a recipe that has the output
head or SwiGLU's input in float8, too. All arms of a seed start from the same weights, see the same batches, and are
evaluated on the same held-out tokens when their learning rate has decayed to zero. The yardstick differs from bf16 by
rounding alone, so a gap of its size says nothing: float32, or for sizes that want a GPU bf16 that adds the gradients of
a batch's halves. Runs are those of ``recipes/pretrain.py``, torchao's those of ``scripts/bench/pretrain_torchao.py``.

The gap is that of the logarithms of the losses, in per cent; its interval is that of a randomized block design (blocks
are seeds): log loss = arm + seed + noise, the noise pooled over all arms, 95 % by Student's t.

``--shared-steps N`` has the noise of a training's chaotic start taken out: the first N steps of each seed are trained
once, in bf16, at a constant rate, and every arm starts from that checkpoint and lets its rate decay over ``--steps``.
Arms may then be changes of a recipe, too, such as ``tensorwise+fprop``, and the final weights' loss is measured in
several forward passes: ``scripts/bench/pretrain_arm.py`` lists both.

Finished runs are kept and not trained again; runs that are missing are trained, ``--jobs`` at a time, each on one GPU
if there is any.

    python scripts/loss_compare.py --recipes tensorwise rowwise --seeds 0 1 2 --write-docs
    python scripts/loss_compare.py --size moe-debug --recipes tensorwise rowwise  # a Qwen3-MoE, experts in float8, too
    python scripts/loss_compare.py --size 120m --recipes tensorwise --steps 600 --jobs 8  # on GPUs
    python scripts/loss_compare.py --size 120m --recipes tensorwise tensorwise+fprop --shared-steps 2000 --steps 400

Runs that were trained elsewhere, by torchtitan for one, are compared by what they logged: give an arm's name and its
runs, in the same order of seeds. Where nothing was held out, it is the mean of the last tenth of the training losses.

    python scripts/loss_compare.py --recorded bf16 runs/a_seed* --recorded float8 runs/b_seed*
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

import f8sub
from scripts.table import ROOT, Table, finish, parser

TRAINER = ROOT / "recipes" / "pretrain.py"
PEER = ROOT / "scripts" / "bench" / "pretrain_torchao.py"
ARM = ROOT / "scripts" / "bench" / "pretrain_arm.py"
PEERS = ("torchao-tensorwise", "torchao-rowwise")
BASELINE = "bf16"
SHARED = "shared"
"""The run that trains the steps that all arms of a seed have in common."""
YARDSTICK = "float32"
HALVES = "bf16-halves"
VARIANTS = {
    "-head": ("float8.skip_defaults", "false"),
    "-swiglu": ("float8.keep_swiglu_input", "float8"),
}
"""Ends the names of arms that have the output head or SwiGLU's input in float8: the option of recipes/pretrain.py."""
CONFIDENCE = 0.95
LEARNING_RATE = 3e-4
"""Ends as low as 1e-3, at which training is chaotic: the gap of one seed of ``tensorwise`` was +2.0 % with sequences of
128 tokens and -1.0 % with 64.
"""
EVAL_BATCHES = 256
ON_CPU: dict[str, Any] = {"training.seq_len": 128, "training.local_batch_size": 4, "training.device": "cpu"}
ON_GPU: dict[str, Any] = {"training.seq_len": 512, "training.local_batch_size": 32, "eval.batches": 32}
# Numbers are compared, also of experts that are too narrow to gain time.
EXPERTS = {"float8.experts": "true"}
SIZES = {
    "debug": ON_CPU,
    "moe-debug": ON_CPU | EXPERTS,
    "10m": ON_GPU,
    "120m": ON_GPU,
    "120m-128": ON_GPU,
    "1b": ON_GPU | {"eval.batches": 16},
    "moe-120m": ON_GPU | EXPERTS,
}
"""How each is trained: a Llama of 3.5M parameters, and a Qwen3-MoE of 4.3M, of whose 8 experts a token takes 2. The
others want a GPU: Llamas of 10M, 120M and 1B, and a Qwen3-MoE of 120M, of whose 32 experts a token takes 4. 120m-128
has attention's heads of 128 channels instead of 64."""
SPIKE, NEIGHBOURS = 1.2, 10
"""A step is a spike if its loss exceeds the median of so many steps on either side and itself by this factor."""
SMOOTHED_STEPS = 20
"""The plot's curves are means over so many logged steps."""


TRAINING = ("loss_metrics/global_avg_loss", "loss")
"""Names that the training loss goes by: torchtitan's in TensorBoard, and that of JSON lines."""

HELD_OUT = ("validation_metrics/loss", "eval_loss")
"""Likewise, the loss of the validator."""

LAST = 0.1
"""Where nothing was held out, a run's loss is the mean of this share of its logged training losses, the last ones."""


class Recorded(NamedTuple):
    """One run."""

    training: dict[int, float]  # loss by step
    held_out: float | None  # the last one; None where none was logged

    @property
    def final(self) -> float:
        """What arms are compared by."""
        if self.held_out is not None:
            return self.held_out
        losses = [self.training[step] for step in sorted(self.training)]
        last = losses[-max(1, round(LAST * len(losses))) :]
        return math.fsum(last) / len(last)


def read_run(path: Path) -> Recorded:
    """Read a run's losses.

    ``path`` is a file of JSON lines with ``step`` and a loss; or a folder, with such a ``metrics.jsonl`` or
    TensorBoard's event files anywhere in it. Where a run was resumed, the later file says what a step's loss is.
    """
    names = (*TRAINING, *HELD_OUT)
    series = read_tensorboard(path, names) if path.is_dir() else {name: {} for name in names}
    for file in [path] if path.is_file() else sorted(path.rglob("metrics.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            for name in series.keys() & record.keys():
                series[name][int(record["step"])] = float(record[name])
    training, held_out = (
        next((series[name] for name in names if series[name]), {}) for names in (TRAINING, HELD_OUT)
    )
    if not training:
        raise ValueError(
            f"{path}: no training loss, by the names {' or '.join(TRAINING)}, in TensorBoard's event files or "
            "metrics.jsonl; torchtitan writes them with --metrics.enable_tensorboard"
        )
    return Recorded(training, held_out[max(held_out)] if held_out else None)


def read_tensorboard(folder: Path, names: Iterable[str]) -> dict[str, dict[int, float]]:
    """Name -> step -> value, of what event files anywhere in a folder have by these names; a later file counts."""
    series: dict[str, dict[int, float]] = {name: {} for name in names}
    files = sorted(folder.rglob("events.out.tfevents.*"))
    if not files:
        return series
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()  # 0: all of them
        for name in series.keys() & set(events.Tags()["scalars"]):
            series[name] |= {event.step: event.value for event in events.Scalars(name)}
    return series


def arms_of(given: list[list[str]], baseline: str) -> dict[str, list[Recorded]]:
    """The runs of each arm, in the order of its seeds; an error where they cannot be compared with ``baseline``.

    ``given`` has of each arm its name, and the files or folders of its runs.
    """
    arms = {name: [read_run(Path(path)) for path in paths] for name, *paths in given}
    counts = {name: len(runs) for name, runs in arms.items()}
    if baseline not in arms or len(arms) < 2 or len(arms) < len(given):
        raise ValueError(
            f"arms {[name for name, *_ in given]}: give {baseline} and at least one other, each once"
        )
    if 0 in counts.values() or len(set(counts.values())) > 1:
        raise ValueError(
            f"runs of each arm: {counts}; give those of the same seeds for every arm, in one order"
        )
    steps = {name: [sorted(run.training) for run in runs] for name, runs in arms.items()}
    logged = steps[baseline][0]
    if other := next((name for name, runs in steps.items() if any(run != logged for run in runs)), None):
        raise ValueError(
            f"{other}: logged other steps than the first run of {baseline}, which has {len(logged)}, {logged[0]} to "
            f"{logged[-1]}; compare runs of the same length and the same log interval"
        )
    if len({run.held_out is None for runs in arms.values() for run in runs}) > 1:
        raise ValueError("some runs have a held-out loss and some have none; validate in all arms or in none")
    return arms


class Run(NamedTuple):
    """One arm with one seed."""

    arm: str
    seed: int


class Protocol(NamedTuple):
    """How every arm is trained.

    Attributes:
        steps: Trained by each arm.
        size: One of ``SIZES``.
        lr: The highest learning rate.
        shared_steps: Trained once for all arms of a seed, before those.
        compiled: With torch.compile.
        source: The text, as recipes/pretrain.py names it.
    """

    steps: int
    size: str = "debug"
    lr: float = LEARNING_RATE
    shared_steps: int = 0
    compiled: bool = False
    source: str = "stdlib"

    def total(self, run: Run) -> int:
        """The step at which a run ends."""
        return self.shared_steps + (self.steps if run.arm != SHARED else 0)

    @property
    def checkpoint(self) -> str:
        """The name that recipes/pretrain.py gives the checkpoint of the shared steps."""
        return f"step-{self.shared_steps:08d}"


def settings(run: Run, protocol: Protocol) -> list[str]:
    """The command line of ``recipes/pretrain.py``: one to three minutes on two idle cores but for the size of a GPU."""
    kind = SIZES[protocol.size]
    total = protocol.total(run)
    chosen = {
        "model.size": protocol.size,
        "training.steps": total,
        "training.seed": run.seed,
        **kind,
        "optimizer.lr": protocol.lr,
        "lr_scheduler.warmup_steps": 40,
        "lr_scheduler.min_lr_factor": 0.0,
        "eval.interval": total,
        "eval.batches": min(
            kind.get("eval.batches", EVAL_BATCHES), 2 * total
        ),  # a trial of a few steps needs no more
        "metrics.tensorboard": "false",
    }
    if protocol.source != "stdlib":
        chosen["data.source"] = protocol.source
    if protocol.compiled:
        chosen["compile.enabled"] = "true"
    if run.arm == SHARED:
        chosen |= {"lr_scheduler.decay_ratio": 0.0, "checkpoint.interval": total}
    elif protocol.shared_steps:
        chosen["lr_scheduler.decay_ratio"] = protocol.steps / total
        chosen["checkpoint.resume"] = protocol.checkpoint
    if run.arm == YARDSTICK:
        chosen["training.dtype"] = "float32"
    if run.arm == HALVES:
        chosen["training.gradient_accumulation_steps"] = 2
        chosen["training.local_batch_size"] //= 2
        chosen["eval.batches"] *= 2
    if run.arm in (BASELINE, YARDSTICK, HALVES, SHARED, *PEERS):
        chosen["float8.enabled"] = "false"
    else:
        chosen["float8.recipe"] = run.arm.partition("+")[0].split("-")[0]
        for ending, (option, value) in VARIANTS.items():
            if run.arm.endswith(ending):
                chosen[option] = value
    return [word for name, value in chosen.items() for word in (f"--{name}", str(value))]


def program(run: Run, protocol: Protocol) -> list[str]:
    """What trains an arm: the first words of its command line."""
    if run.arm in PEERS:
        return [str(PEER), run.arm.removeprefix("torchao-")]
    measures_forwards = protocol.shared_steps and run.arm not in (SHARED, HALVES, YARDSTICK)
    if "+" in run.arm or (measures_forwards and not run.arm.endswith(tuple(VARIANTS))):
        return [str(ARM), run.arm]
    return [str(TRAINER)]


class Results:
    """Finished runs, one JSON file each."""

    def __init__(self, folder: Path, protocol: Protocol) -> None:
        self.folder = folder
        self.protocol = protocol

    def load(self, run: Run) -> dict[str, Any] | None:
        """What ``train`` kept of a run with these settings; None if it has to be trained."""
        path = self._path(run)
        lacks_checkpoint = (
            run.arm == SHARED and not (self._dump(run) / "checkpoints" / self.protocol.checkpoint).is_dir()
        )
        if not path.exists() or lacks_checkpoint:
            return None
        kept: dict[str, Any] = json.loads(path.read_text())
        return kept if kept["settings"] == settings(run, self.protocol) else None

    def train(self, run: Run, on_step: Callable[[int], None], slot: int = 0) -> dict[str, Any]:
        """Train in a process of its own, keep its losses and return them; GPUs are taken in turn by the slots."""
        chosen, dump, started = settings(run, self.protocol), self._dump(run), time.monotonic()
        shutil.rmtree(dump, ignore_errors=True)
        dump.mkdir(parents=True)
        lines, log = dump / "metrics.jsonl", dump / "log.txt"
        if self.protocol.shared_steps and run.arm != SHARED:
            self._start_from(Run(SHARED, run.seed), dump)
        command = [sys.executable, *program(run, self.protocol), "--job.dump_folder", str(dump), *chosen]
        environment = {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive", **os.environ}
        if torch.cuda.device_count():
            every = ",".join(map(str, range(torch.cuda.device_count())))
            gpus = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
            environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        with (
            log.open("w") as output,
            subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process,
        ):
            try:
                while process.poll() is None:
                    time.sleep(0.5)
                    on_step(lines.read_text().count('"loss"') if lines.exists() else 0)
            except BaseException:
                process.kill()
                raise
        if process.returncode or (recorded := read_run(lines)).held_out is None:
            raise RuntimeError(f"{run.arm}, seed {run.seed}: {' '.join(command)}\n{log.read_text()[-3000:]}")
        kept = {
            "settings": chosen,
            "seconds": time.monotonic() - started,
            "losses": list(recorded.training.values()),
            "eval_loss": recorded.held_out,
            **forwards_of(lines),
        }
        partial = self._path(run).with_suffix(".partial")
        partial.write_text(json.dumps(kept) + "\n")
        partial.replace(self._path(run))
        return kept

    def _start_from(self, shared: Run, dump: Path) -> None:
        """Show the shared steps' checkpoint to a run that resumes from it."""
        there, here = (
            folder / "checkpoints" / self.protocol.checkpoint for folder in (self._dump(shared), dump)
        )
        here.parent.mkdir()
        here.symlink_to(there.resolve(), target_is_directory=True)

    def _path(self, run: Run) -> Path:
        return self.folder / f"{run.arm}-seed{run.seed}.json"

    def _dump(self, run: Run) -> Path:
        return self._path(run).with_suffix("")


def forwards_of(lines: Path) -> dict[str, dict[str, float]]:
    """The held-out losses of the final weights by forward pass, where a run measured them."""
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    return next(({"forwards": record["forwards"]} for record in records if "forwards" in record), {})


def train_missing(results: Results, runs: list[Run], jobs: int = 1) -> None:
    """Train what is not there yet, so many at a time, each with a bar."""
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(jobs):
        slots.put(number)
    stopped = threading.Event()
    times = TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times
    with Progress(*columns, console=Console()) as bar, ThreadPoolExecutor(jobs) as pool:

        def train(run: Run) -> None:
            if stopped.is_set():
                return
            slot, name = slots.get(), f"{run.arm}, seed {run.seed}"
            task = bar.add_task(name, total=results.protocol.total(run))

            def show(step: int) -> None:
                if stopped.is_set():
                    raise InterruptedError(f"{name}: the script was stopped")
                start = 0 if run.arm == SHARED else results.protocol.shared_steps
                bar.update(task, completed=start + step)

            try:
                kept = results.train(run, show, slot)
            finally:
                slots.put(slot)
                bar.remove_task(task)
            bar.console.print(f"{name}: {kept['eval_loss']:.4f} in {kept['seconds']:.0f} s")

        failed = []
        try:
            for done in as_completed(pool.submit(train, run) for run in runs if results.load(run) is None):
                if (error := done.exception()) is not None:
                    bar.console.print(f"[red]{str(error).splitlines()[0]}")
                    failed.append(error)
        finally:
            stopped.set()
    if failed:
        # The others are kept, and need not be trained again.
        raise failed[0]


@functools.cache
def student_t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t above the median, by bisection of its integrated density."""

    def above_median(t: float) -> float:
        grid = torch.linspace(0, t, 20001, dtype=torch.float64)
        density = (1 + grid.square() / degrees) ** (-(degrees + 1) / 2)
        log_scale = (
            math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
        )
        return math.exp(log_scale) * float(torch.trapezoid(density, grid))

    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if above_median(middle) < probability - 0.5 else (low, middle)
    return (low + high) / 2


def gaps(losses: dict[str, list[float]]) -> dict[str, dict[str, float | None]]:
    """Gap to the baseline in per cent, and the half width of its confidence interval; None for one seed.

    Args:
        losses: arm -> loss of each seed, the same seeds in the same order; the baseline among them.
    """
    table = 100 * torch.tensor(list(losses.values()), dtype=torch.float64).log()
    arms, seeds = table.shape
    noise = table - table.mean(0) - table.mean(1, keepdim=True) + table.mean()
    degrees = (arms - 1) * (seeds - 1)
    half_width = None
    if degrees:
        variance = float(noise.square().sum()) / degrees
        half_width = student_t_quantile((1 + CONFIDENCE) / 2, degrees) * math.sqrt(2 * variance / seeds)
    means = dict(zip(losses, table.mean(1).tolist(), strict=True))
    return {
        arm: {"gap_percent": mean - means[BASELINE], "half_width_percent": half_width}
        for arm, mean in means.items()
        if arm != BASELINE
    }


def spikes(losses: list[float]) -> int:
    """How many steps are spikes; the first and last ones, which lack neighbours, are not counted."""
    inner = range(NEIGHBOURS, len(losses) - NEIGHBOURS)
    return sum(
        losses[step] > SPIKE * statistics.median(losses[step - NEIGHBOURS : step + NEIGHBOURS + 1])
        for step in inner
    )


def report(arms: dict[str, list[Recorded]], seeds: list[int]) -> dict[str, Any]:
    """The figures of all arms, each with all seeds."""
    first = arms[BASELINE][0]
    logged = sorted(first.training)
    losses = {arm: [run.final for run in runs] for arm, runs in arms.items()}
    return {
        "measure": "Mean of the last training losses" if first.held_out is None else "Held-out loss",
        "steps": logged[-1],
        "logged": logged,
        "seeds": seeds,
        "eval_losses": losses,
        "gaps": gaps(losses),
        "spikes": {
            arm: sum(spikes([run.training[step] for step in logged]) for run in runs)
            for arm, runs in arms.items()
        },
        "train_losses": {
            arm: [[run.training[step] for step in logged] for run in runs] for arm, runs in arms.items()
        },
    }


def table(figures: dict[str, Any]) -> Table:
    """Arms by seeds, and the gap of each arm."""
    rows = []
    for arm, losses in figures["eval_losses"].items():
        gap = figures["gaps"].get(arm)
        by_seed = [f"{loss:.4f}" for loss in losses]
        rows.append([arm, *by_seed, "" if gap is None else interval(gap), str(figures["spikes"][arm])])
    gap_column = f"gap, {100 * CONFIDENCE:.0f}% interval"
    columns = ["", *(f"seed {seed}" for seed in figures["seeds"]), gap_column, "spikes"]
    return Table(f"{figures['measure']} after {figures['steps']} steps", columns, rows)


def forwards_table(figures: dict[str, Any]) -> Table:
    """Gaps of the same weights by what their forward pass is computed in, per cent of bf16's of those weights."""
    rows = []
    for arm, seeds in figures["forwards"].items():
        for forward in seeds[0]:
            found = [100 * math.log(seed[forward] / seed["bf16"]) for seed in seeds]
            mean = math.fsum(found) / len(found)
            rows.append([arm, forward, f"{mean:+.3f} %", " ".join(f"{one:+.3f}" for one in found)])
    return Table("Held-out loss of the final weights", ["trained", "forward", "mean", "by seed"], rows)


def interval(gap: dict[str, float | None]) -> str:
    half_width = "" if gap["half_width_percent"] is None else f" ± {gap['half_width_percent']:.2f}"
    return f"{gap['gap_percent']:+.2f}{half_width} %"


def draw(figures: dict[str, Any], path: Path) -> None:
    """Each arm's training loss against the baseline's, the mean over the seeds, and the held-out gaps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    curves, final = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
    smooth = {arm: smoothed(losses) for arm, losses in figures["train_losses"].items()}
    for position, (arm, gap) in enumerate(figures["gaps"].items()):
        color = "black" if arm in (YARDSTICK, HALVES) else f"C{position}"
        relative = 100 * (smooth[arm] / smooth[BASELINE]).log().mean(0)
        curves.plot(figures["logged"][-len(relative) :], relative, color=color, linewidth=1, label=arm)
        final.errorbar(
            position, gap["gap_percent"], gap["half_width_percent"], fmt="o", color=color, capsize=3
        )
    for axes in (curves, final):
        axes.axhline(0, color="tab:gray", linewidth=0.8)
    title = f"training loss, {SMOOTHED_STEPS}-step means"
    curves.set(xlabel="step", ylabel=f"gap, % of {BASELINE}", title=title)
    curves.legend(loc="upper left", bbox_to_anchor=(0, -0.15), ncols=4)  # below, where no curve is
    final.set(title=f"{figures['measure'].lower()} at the end")
    final.set_xticks(range(len(figures["gaps"])), list(figures["gaps"]), rotation=90)
    figure.savefig(path, dpi=120)


def smoothed(losses: list[list[float]]) -> torch.Tensor:
    """Moving means over ``SMOOTHED_STEPS`` steps of (seeds, steps) losses."""
    runs = torch.tensor(losses, dtype=torch.float64)
    return runs.unfold(1, min(SMOOTHED_STEPS, runs.shape[1]), 1).mean(-1)


def main() -> None:
    made = parser(__doc__, "loss_compare")
    ours = f8sub.recipe_names()
    made.add_argument(
        "--recipes",
        nargs="+",
        default=ours,
        type=arm_name,
        help=f"{', '.join([*ours, *PEERS])}, or a change of one, as scripts/bench/pretrain_arm.py lists them",
    )
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--steps", type=int, default=200)
    made.add_argument("--lr", type=float, default=LEARNING_RATE, help="the highest learning rate")
    made.add_argument(
        "--shared-steps", type=int, default=0, help="trained once, in bf16, before every arm's own"
    )
    made.add_argument("--source", default="stdlib", help="the text, as recipes/pretrain.py names it")
    made.add_argument("--compile", action="store_true", help="train with torch.compile")
    made.add_argument("--jobs", type=int, default=1, help="runs that are trained at a time")
    made.add_argument("--head", action="store_true", help="each recipe with the output head in float8, too")
    made.add_argument("--swiglu", action="store_true", help="each recipe with SwiGLU's input in float8, too")
    made.add_argument(
        "--size", choices=SIZES, default="debug", help="of the model, as recipes/pretrain.py has it"
    )
    made.add_argument(
        "--folder", type=Path, help="of the finished runs; by default one of each size, in runs/"
    )
    recorded = {"nargs": "+", "action": "append", "metavar": ("ARM", "RUN")}
    made.add_argument("--recorded", **recorded, help="compare these and train nothing")
    arguments = made.parse_args()
    if arguments.size != "debug":
        arguments.marker += f"_{arguments.size}"
    arguments.folder = arguments.folder or ROOT / "runs" / arguments.marker
    if arguments.recorded:
        if arguments.write_docs:
            made.error("--write-docs is for the runs that this script trains")
        try:
            arms = arms_of(arguments.recorded, BASELINE)
        except ValueError as error:
            made.error(str(error))
        figures = report(arms, list(range(len(arms[BASELINE]))))
        arguments.folder.mkdir(parents=True, exist_ok=True)
    else:
        figures = trained(arguments)
    finish(arguments, figures, table(figures))
    if "forwards" in figures:
        forwards_table(figures).show()
    draw(figures, arguments.folder / "loss.png")
    print(f"Plot: {arguments.folder / 'loss.png'}")


def trained(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of the runs that the command line asks for, once those that are missing are trained."""
    # As Ctrl-C does: with the run it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    protocol = Protocol(
        arguments.steps,
        arguments.size,
        arguments.lr,
        arguments.shared_steps,
        arguments.compile,
        arguments.source,
    )
    results, seeds = Results(arguments.folder, protocol), arguments.seeds
    if protocol.shared_steps:
        shared = [Run(SHARED, seed) for seed in seeds]
        train_missing(results, shared, arguments.jobs)
    endings = [ending for ending in VARIANTS if getattr(arguments, ending.strip("-"))]
    variants = [recipe + ending for ending in endings for recipe in arguments.recipes if recipe not in PEERS]
    kind = SIZES[arguments.size]
    yardstick = YARDSTICK if kind is ON_CPU or kind.keys() >= EXPERTS.keys() else HALVES
    names = [BASELINE, yardstick, *arguments.recipes, *variants]
    train_missing(results, [Run(arm, seed) for seed in seeds for arm in names], arguments.jobs)
    kept = {arm: [results.load(Run(arm, seed)) for seed in seeds] for arm in names}
    arms = {
        arm: [Recorded(dict(enumerate(run["losses"], 1)), run["eval_loss"]) for run in runs if run]
        for arm, runs in kept.items()
    }
    seconds = {arm: [run["seconds"] for run in runs if run] for arm, runs in kept.items()}
    forwards = {
        arm: [run["forwards"] for run in runs if run and "forwards" in run] for arm, runs in kept.items()
    }
    more = {"forwards": {arm: found for arm, found in forwards.items() if found}}
    return {**report(arms, seeds), "seconds": seconds, **(more if more["forwards"] else {})}


def arm_name(word: str) -> str:
    """A recipe's name, one of torchao's, or a change of a recipe, checked where that is made."""
    base = word.partition("+")[0]
    if base not in (*f8sub.recipe_names(), *PEERS):
        raise argparse.ArgumentTypeError(f"no recipe {base!r}; there are {[*f8sub.recipe_names(), *PEERS]}")
    return word


if __name__ == "__main__":
    main()
