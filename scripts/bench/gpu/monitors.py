"""What a monitor costs: whole steps of blocks of a Llama 3 8B that are sampled, in turns with steps that are not.

A sampled step of compiled blocks runs them eagerly, and every operand is measured besides. The last column spreads what
it takes over 100 steps, as ``f8sub.Monitor(model, every=100)`` does.
"""

from __future__ import annotations

from typing import Any

import torch

import f8sub
from scripts.bench.gpu.llama import Batch, Trainer
from scripts.bench.gpu.session import Session
from scripts.bench.gpu.slices import SHAPES, TINY
from scripts.bench.gpu.variants import Variant, chosen
from scripts.bench.ranks import process_group
from scripts.bench.timing import SETS, by_launches, in_turns, kernels, summary
from scripts.table import Table

RECIPES = ("tensorwise", "blockwise")
"""Whose steps are sampled where no variants are asked for by name."""

EVERY = 100

COLUMNS = (
    ("ms", "{plain[median_ms]:.2f}"),
    ("spread", "{plain[spread_ms]:.2f}"),
    ("kernels", "{plain[launches]:d}"),
    ("sampled ms", "{sampled[median_ms]:.2f}"),
    ("spread", "{sampled[spread_ms]:.2f}"),
    ("kernels", "{sampled[launches]:d}"),
    ("operands", "{operands:d}"),
    (f"of the time at N = {EVERY}", "{share:.2%}"),
)


def group(session: Session) -> None:
    named, _ = chosen(session.only or [f"f8sub {recipe} compiled" for recipe in RECIPES], session.device)
    variants = [variant for variant in named if variant.library == "f8sub" and not variant.graphed]
    figures = session.figures["monitor"] = {}
    with process_group(session.device):
        for tokens, blocks in session.sizes(SHAPES, TINY):
            rows = figures[f"{tokens}x{blocks}"] = {}
            for variant in variants:
                with session.attempt(f"monitor {tokens}x{blocks} {variant.name}"):
                    rows[variant.name] = measured(session, variant, tokens, blocks)
    for shape, rows in figures.items():
        title = f"whole steps with and without a monitor, tokens x blocks {shape}, {session.where}"
        session.tables.append(Table.of(title, rows.items(), COLUMNS))


def measured(session: Session, variant: Variant, tokens: int, blocks: int) -> dict[str, Any]:
    """Times of a variant's steps, and what a sample adds to one."""
    torch._dynamo.reset()
    size, device = "tiny" if session.tiny else "8b", session.device
    torch.manual_seed(1)
    batches = [Batch.random(size, tokens, device) for _ in range(SETS)]
    trainer = Trainer(variant, size, tokens, device, blocks, session.checkpoint)
    monitor = f8sub.Monitor(trainer.model, every=1)

    def sampled(batch: Batch) -> None:
        with monitor:
            trainer.loss_and_gradients(batch)
        trainer.optimizer.step()
        trainer.clear()
        variant.precompute(trainer.model)

    runs = {"plain": trainer.step, "sampled": sampled}
    found: dict[str, Any] = {}
    for name, run in runs.items():
        run(batches[0])
        found[name] = kernels(run, batches[1], device)
    timers = {name: by_launches(run, batches, device, trainer.clear) for name, run in runs.items()}
    for name, times in in_turns(timers, session.rounds).items():
        found[name].update(summary(times))
    monitor.flush()
    plain, sample = (found[name]["median_ms"] for name in runs)
    last = [row for row in monitor.rows if row.step == monitor.rows[-1].step]
    return {**found, "operands": len(last), "share": (sample - plain) / (EVERY * plain)}
