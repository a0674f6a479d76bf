"""Blocks of a Llama 3 8B under FSDP2: tokens/s and peak memory, every variant; of one device, or one of several.

Blocks: forward and backward of the blocks, weights changed and scales precomputed before each, untimed. Step: all of a
training step, with embeddings, head, loss, AdamW and precompute_scales. Each variant is built when the one before is
gone, and takes turns with bf16 compiled, which stays: its own figure is of that, and what it drifts by is told. Before
anything is timed the first loss and two weights' gradients are compared with bf16's.

Graphed: the whole step as one CUDA graph, beside the same step as Python launches it. The model is not sharded there
and its weights are bfloat16, see ``Trainer``. What is replayed is compared with what is launched before it is timed.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from scripts.bench.gpu import graphs
from scripts.bench.gpu.llama import Batch, Trainer
from scripts.bench.gpu.session import Session
from scripts.bench.gpu.variants import TRANSFORMER_ENGINE, Variant, allow_recompiles, chosen
from scripts.bench.ranks import process_group
from scripts.bench.timing import (
    SETS,
    Run,
    by_launches,
    host_ms,
    in_turns,
    kernels,
    sqnr,
    summary,
    wait,
)
from scripts.table import Table

SHAPES = ["8192x4"]
TINY = ["32x4"]
"""Tokens and blocks."""

LARGEST_LOSS_ERROR = 0.05
FLOOR_DB = 14.0
"""Of a gradient that went through one block; each block adds an error of its own.

On an H200 e5m2 left 9 dB of four blocks and 6 of eight; noise alone has 0.
"""

BLOCKS, STEP, GRAPHED = "blocks", graphs.LAUNCHED, graphs.GRAPHED

COLUMNS = (
    ("ms", "{time[median_ms]:.2f}"),
    ("spread", "{time[spread_ms]:.2f}"),
    ("tokens/s", "{time[tokens_per_s]:.0f}"),
    ("over bf16", "{time[over_bf16]:.2f}x"),
    ("peak GB", "{peak/1e9:.1f}"),
)
OF_BLOCKS = (("host ms", "{host_ms[blocks]:.1f}"), ("kernels", "{launches:d}"))
OF_STEPS = (
    ("first loss", "{check[loss]:.3f}"),
    ("dw dB, first and last", "{check[first]:.1f} / {check[last]:.1f}"),
)

Runs = dict[str, tuple[Run, Callable[[], None]]]
"""What is timed by one batch, and what is done before each and is not timed."""


def first_step(trainer: Trainer, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the probes, which all variants begin with alike."""
    loss = float(trainer.loss_and_gradients(batch))
    gradients = trainer.gradients()
    trainer.clear()
    return loss, gradients


def floor_db(blocks: int) -> float:
    """The least SQNR of a gradient that went through so many blocks."""
    return max(FLOOR_DB - 10 * math.log10(blocks), 1.0)


def check(trainer: Trainer, batch: Batch, right: tuple[float, dict[str, torch.Tensor]]) -> dict[str, float]:
    """Loss and the gradients' SQNR in dB; an error where they are not bf16's within what float8 explains."""
    for _ in range(trainer.variant.passes_before_scales):
        first_step(trainer, batch)
    loss, gradients = first_step(trainer, batch)
    # TransformerEngine has q's rows in one weight with k's and v's.
    rows = {name: gradients[name][: len(exact)] for name, exact in right[1].items()}
    found = {"loss": loss, **{name: sqnr(rows[name], right[1][name]) for name in rows}}
    if not abs(loss / right[0] - 1) <= LARGEST_LOSS_ERROR:
        raise RuntimeError(f"{trainer.variant.name}: first loss {loss}, bf16's {right[0]}")
    least = floor_db(trainer.blocks)
    if not min(found[name] for name in gradients) >= least:
        raise RuntimeError(f"{trainer.variant.name}: gradients {found} dB of bf16's, at least {least:.1f}")
    return found


def warm_up(trainer: Trainer, runs: Runs, batches: list[Batch], others: int) -> dict[str, int]:
    """Two of everything, and the most bytes allocated in the second, ``others`` that were there before aside."""
    peaks = {}
    for name, (run, _) in runs.items():
        for batch in batches[:2]:
            trainer.between()
            if trainer.device.type == "cuda":
                wait(trainer.device)
                torch.cuda.reset_peak_memory_stats(trainer.device)
            run(batch)
        trainer.clear()
        if trainer.device.type == "cuda":
            wait(trainer.device)
            peaks[name] = torch.cuda.max_memory_allocated(trainer.device) - others
    return peaks


def inspect(trainer: Trainer, runs: Runs, batch: Batch) -> dict[str, Any]:
    """Kernels of the first of the runs, and the host's milliseconds of each."""
    run, between = next(iter(runs.values()))
    between()
    found: dict[str, Any] = {**kernels(run, batch, trainer.device), "host_ms": {}}
    for name, (run, between) in runs.items():
        between()
        found["host_ms"][name] = host_ms(run, batch, trainer.device)
    trainer.clear()
    return found


def measured(trainer: Trainer, batches: list[Batch], others: int) -> tuple[Runs, dict[str, Any]]:
    """What is to be timed, and what is looked at once."""
    runs: Runs = {} if trainer.variant.graphed else {BLOCKS: (trainer.pass_through_blocks, trainer.between)}
    runs[STEP] = trainer.step, trainer.clear
    row: dict[str, Any] = {"peak_bytes": warm_up(trainer, runs, batches, others)}
    if trainer.variant.graphed:
        graphed, row["graph"] = graphs.recorded(trainer, batches)
        runs[GRAPHED] = graphed, trainer.clear
    return runs, {**row, **inspect(trainer, runs, batches[0])}


def allocated(device: torch.device) -> int:
    """Bytes, of what is still referred to; cycles through tensors take more than one round."""
    for _ in range(3):
        gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def timed(times: list[float], baseline: list[float], tokens: int) -> dict[str, float]:
    """Of one variant's rounds and the bf16 rounds between them; the ratio is the median of the rounds' own."""
    row = summary(times)
    row["tokens_per_s"] = tokens / row["median_ms"] * 1e3
    row["over_bf16"] = statistics.median(b / t for b, t in zip(baseline, times, strict=True))
    return row


class Group:
    """The slice, once: what all variants share."""

    def __init__(self, session: Session, tokens: int, blocks: int, variants: list[Variant]) -> None:
        self.session, self.tokens, self.blocks, self.device = session, tokens, blocks, session.device
        self.size = "tiny" if session.tiny else "8b"
        torch.manual_seed(1)
        self.batches = [Batch.random(self.size, tokens, self.device) for _ in range(SETS)]
        others = allocated(self.device)
        self.baseline = self.trainer(variants[0])
        self.right = first_step(self.baseline, self.batches[0])
        self.runs, row = measured(self.baseline, self.batches, others)
        self.rows = {variants[0].name: {"check": {"loss": self.right[0]}, **row}}
        self.turns: dict[str, list[float]] = {what: [] for what in self.runs}

    def trainer(self, variant: Variant) -> Trainer:
        """A variant's model, checkpointed as all of them are."""
        how = self.session.checkpoint
        return Trainer(variant, self.size, self.tokens, self.device, self.blocks, how)

    def measure(self, variant: Variant) -> None:
        """One variant, in turns with the baseline."""
        others = allocated(self.device)
        trainer = self.trainer(variant)
        row: dict[str, Any] = {"check": check(trainer, self.batches[0], self.right)}
        runs, found = measured(trainer, self.batches, others)
        row.update(found)
        for what in runs:
            pair = {"own": runs[what], "bf16": self.runs[what]}
            timers = {
                key: by_launches(run, self.batches, self.device, between)
                for key, (run, between) in pair.items()
            }
            times = in_turns(timers, self.session.rounds)
            trainer.clear()
            self.baseline.clear()
            self.turns[what] += times["bf16"]
            row[what] = timed(times["own"], times["bf16"], self.tokens)
        self.rows[variant.name] = row
        self.finish_baseline()

    def finish_baseline(self) -> None:
        """The baseline's own row: all of its rounds so far, and the distance of the quartiles as its drift."""
        row = self.rows[self.baseline.variant.name]
        for what, times in self.turns.items():
            row[what] = timed(times, times, self.tokens)


def group(session: Session) -> None:
    allow_recompiles()
    candidates, skipped = chosen(session.only, session.device)
    reasons = {variant: why_not(variant, session) for variant in candidates}
    skipped.update((variant.name, reason) for variant, reason in reasons.items() if reason is not None)
    variants = [variant for variant in candidates if variant.name not in skipped]
    of_kind = {
        kind: [variant for variant in variants if variant.graphed == (kind == "graphed")]
        for kind in ("tokens", "graphed")
    }
    figures = session.figures["slice"] = {"skipped": skipped, "tokens": {}, "graphed": {}}
    with process_group(session.device):
        figures["ranks"] = dist.get_world_size()
        for tokens, blocks in session.sizes(SHAPES, TINY):
            for kind, chosen_ones in of_kind.items():
                if chosen_ones:
                    measure_all(session, tokens, blocks, chosen_ones, figures[kind])
    for shape, rows in figures["tokens"].items():
        sharded = f", one of {session.ranks} ranks" if session.ranks > 1 else ""
        how = "" if session.checkpoint == "none" else f", {session.checkpoint} checkpointing"
        title = f"of a Llama 3 8B, tokens x blocks {shape}, {session.where}{sharded}{how}"
        session.tables.append(table(f"forward and backward {title}", rows, BLOCKS))
        session.tables.append(table(f"whole step {title}", rows, STEP))
    for shape, rows in figures["graphed"].items():
        title = f"whole step of them without FSDP2, bf16 weights: launched, and as one CUDA graph, {shape}"
        session.tables.append(Table.of(f"{title}, {session.where}", rows.items(), graphs.COLUMNS))
    if skipped:
        session.tables.append(Table("slice, not run", ("", "reason"), list(skipped.items())))


def why_not(variant: Variant, session: Session) -> str | None:
    """Why a variant is not of this session; None where it is."""
    if variant.graphed and session.ranks > 1:
        return "a captured step is of one rank"
    if variant.library == TRANSFORMER_ENGINE and session.ranks > 1:
        return "a rank's part of q, k and v as one weight is not that of q, with which it is compared"
    if variant.library == TRANSFORMER_ENGINE and session.checkpoint != "none":
        return "TransformerEngine checkpoints with a function of its own"
    return None


def measure_all(
    session: Session, tokens: int, blocks: int, variants: list[Variant], rows: dict[str, dict]
) -> None:
    """The variants at one size, the first as what others are compared with; their rows as they come."""
    torch._dynamo.reset()
    found, shape = None, f"{tokens}x{blocks}"
    with session.attempt(f"slice {shape} {variants[0].name}"):
        found = Group(session, tokens, blocks, variants)
        rows[shape] = found.rows
    for variant in variants[1:] if found is not None else ():
        with session.attempt(f"slice {shape} {variant.name}"):
            found.measure(variant)


def table(title: str, rows: dict[str, dict], what: str) -> Table:
    shown = [
        (name, {**row, "time": row.get(what), "peak": row["peak_bytes"].get(what)})
        for name, row in rows.items()
    ]
    return Table.of(title, shown, (*COLUMNS, *(OF_BLOCKS if what == BLOCKS else OF_STEPS)))
