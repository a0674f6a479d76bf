"""Host time of a training step: what Python, dispatch and launches keep a rank busy with, whatever the GPU does.

Compiled blocks of a Llama 3 8B under FSDP2, forward and backward of so few tokens that the GPU is done before the host.
Each part starts when the GPU has nothing to do. Backward runs in the calling thread, so that a profile shows it.
Variants take turns, several times, each time alone in the process: a host's clock drifts by half within a minute, and
compiled code of another variant would be looked at first. The noise is the range over the turns.

    torchrun --nproc-per-node 2 scripts/bench/host_time.py --checkpoint selective --json host_time.json
    python scripts/bench/host_time.py --only "f8sub tensorwise compiled" --unsharded --profile 40

Without a CUDA device the blocks are tiny and the figures those of the CPU's kernels.
"""

from __future__ import annotations

import cProfile
import dataclasses
import io
import itertools
import os
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from scripts.bench import ranks
from scripts.bench.gpu import checkpoints, slices, variants
from scripts.bench.gpu.llama import Batch, Trainer
from scripts.bench.timing import summary, wait
from scripts.table import Table, finish, parser

ONLY = ["bf16 compiled", "f8sub tensorwise compiled", "f8sub rowwise compiled", "torchao tensorwise compiled"]
PARTS = "forward", "backward", "scales"
COLUMNS = (
    *((f"{part}: ms a block", f"{{{part}[median_ms]:.2f}} ± {{{part}[spread_ms]:.2f}}") for part in PARTS),
    ("forward and backward over bf16", "{over_bf16:.2f}"),
    ("by turn", "{over_bf16_lowest:.2f} to {over_bf16_highest:.2f}"),
)


class Timed:
    """A variant's model and the parts of its step."""

    def __init__(self, variant: variants.Variant, given: Any, device: torch.device) -> None:
        if given.unsharded:
            # As for a graph of a step: bf16 weights, and nothing of FSDP2. Here the step is launched.
            variant = dataclasses.replace(variant, graphed=True)
        self.device, self.blocks, self.variant = device, given.blocks, variant
        size = "8b" if device.type == "cuda" else "tiny"
        self.batch = Batch.random(size, given.tokens, device)
        self.trainer = Trainer(variant, size, given.tokens, device, given.blocks, given.checkpoint)

    def step(self, profiles: dict[str, cProfile.Profile] | None = None) -> dict[str, float]:
        """Milliseconds a block of each part."""
        batch, trainer = self.batch, self.trainer
        hidden: list[torch.Tensor] = []
        runs: dict[str, Callable[[], Any]] = {
            "forward": lambda: hidden.append(trainer.model(batch.hidden, trainer.positions, False)),
            "backward": lambda: hidden.pop().backward(batch.cotangent),
            "scales": lambda: self.variant.precompute(trainer.model),
        }
        found = {}
        for part in PARTS:
            if part == "scales":
                trainer.clear()
                self.variant.mark_changed(trainer.model)
            wait(self.device)
            if profiles is not None:
                profiles[part].enable()
            begin = time.perf_counter()
            runs[part]()
            found[part] = (time.perf_counter() - begin) * 1e3 / self.blocks
            if profiles is not None:
                profiles[part].disable()
        wait(self.device)
        batch.hidden.grad = None
        return found


def measured(name: str, given: Any, device: torch.device) -> list[dict[str, float]]:
    """The steps of one turn of a variant; its model is gone afterwards."""
    timed = made(name, given, device)
    return [timed.step() for _ in range(given.rounds)]


def profiled(name: str, given: Any, device: torch.device) -> dict[str, str]:
    """Where a variant's time goes, by part."""
    timed = made(name, given, device)
    profiles = {part: cProfile.Profile() for part in PARTS}
    for _ in range(given.rounds):
        timed.step(profiles)
    return {
        part: profile_text(profile, given.profile, given.rounds * given.blocks)
        for part, profile in profiles.items()
    }


def made(name: str, given: Any, device: torch.device) -> Timed:
    """A variant's model, compiled and warm."""
    slices.allocated(device)
    variant = next(each for each in variants.all_variants() if each.name == name)
    torch._dynamo.reset()
    timed = Timed(variant, given, device)
    for _ in range(4):
        timed.step()
    return timed


def both(steps: list[dict[str, float]]) -> float:
    """Milliseconds a block of forward and backward."""
    return statistics.median(step["forward"] + step["backward"] for step in steps)


def figures_of(turns: dict[str, list[list[dict[str, float]]]], baseline: str) -> dict[str, dict[str, Any]]:
    """By variant: each part, and forward and backward over the baseline's, of all turns and turn by turn."""
    found: dict[str, dict[str, Any]] = {}
    for name, of in turns.items():
        steps = list(itertools.chain(*of))
        over = [both(one) / both(base) for one, base in zip(of, turns[baseline], strict=True)]
        found[name] = {part: summary([step[part] for step in steps]) for part in PARTS} | {
            "both": both(steps),
            "both_by_turn": [both(one) for one in of],
            "over_bf16": statistics.median(over),
            "over_bf16_lowest": min(over),
            "over_bf16_highest": max(over),
        }
    return found


def profile_text(profile: cProfile.Profile, rows: int, blocks: int) -> str:
    """Functions by their own time, in microseconds a block."""
    profile.create_stats()
    stats = pstats.Stats(profile, stream=io.StringIO()).stats  # type: ignore[attr-defined]
    lines = []
    for (file, line, function), (_, calls, own, whole, _) in sorted(
        stats.items(), key=lambda item: -item[1][2]
    )[:rows]:
        where = "/".join(file.split("/")[-3:])
        figures = f"{own / blocks * 1e6:8.1f} {whole / blocks * 1e6:8.1f} {calls / blocks:7.1f}"
        lines.append(f"{figures}  {where}:{line} {function}")
    return "     own    whole   calls\n" + "\n".join(lines)


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--only", nargs="+", default=ONLY, help="names of variants; bf16 compiled always runs"
    )
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--blocks", type=int, default=6)
    options.add_argument("--unsharded", action="store_true", help="without FSDP2, weights in bf16")
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--rounds", type=int, default=15, help="steps of a turn")
    options.add_argument("--checkpoint", choices=checkpoints.MODES, default="none")
    options.add_argument(
        "--profile", type=int, default=0, help="functions to show of each part, by their own time"
    )
    given = options.parse_args()
    torch.autograd.set_multithreading_enabled(False)
    variants.allow_recompiles()
    has_gpu, is_first = torch.cuda.is_available(), int(os.environ.get("RANK", 0)) == 0
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_gpu else torch.device("cpu")
    names = list(dict.fromkeys((ONLY[0], *given.only)))
    turns: dict[str, list[list[dict[str, float]]]] = {name: [] for name in names}
    with ranks.process_group(device):
        for _ in range(given.turns):
            for name in names:
                turns[name].append(measured(name, given, device))
        profiles = {name: profiled(name, given, device) for name in names} if given.profile else {}
    figures = figures_of(turns, ONLY[0])
    if is_first:
        for name, texts in profiles.items():
            for part, text in texts.items():
                print(f"{name}, {part}: microseconds a block\n{text}\n")
        sharded = "unsharded" if given.unsharded else f"{ranks.world_size()} ranks"
        title = f"Host time, {given.blocks} blocks, {sharded}, checkpointing {given.checkpoint}"
        finish(given, figures, Table.of(title, figures.items(), COLUMNS))


if __name__ == "__main__":
    main()
