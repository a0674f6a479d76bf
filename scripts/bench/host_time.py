"""Host time of a training step: what Python, dispatch and launches keep a rank busy with, whatever the GPU does.

Compiled blocks of a Llama 3 8B under FSDP2, forward and backward of so few tokens that the GPU is done before the host.
Each part starts when the GPU has nothing to do. Backward runs in the calling thread, so that a profile shows it.
Variants are measured one after the other, bf16 before and after all others: their distance is the noise.

    torchrun --nproc-per-node 2 scripts/bench/host_time.py --checkpoint selective --json host_time.json
    python scripts/bench/host_time.py --only "f8sub tensorwise compiled" --unsharded --profile 40

Without a CUDA device the blocks are tiny and the figures those of the CPU's kernels.
"""

from __future__ import annotations

import cProfile
import dataclasses
import io
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


def measure(name: str, given: Any, device: torch.device) -> dict[str, Any]:
    """One variant's figures; its model is gone afterwards."""
    slices.allocated(device)
    variant = next(each for each in variants.all_variants() if each.name == name)
    torch._dynamo.reset()
    timed = Timed(variant, given, device)
    for _ in range(4):
        timed.step()
    steps = [timed.step() for _ in range(given.rounds)]
    found: dict[str, Any] = {part: summary([step[part] for step in steps]) for part in PARTS}
    found["both"] = statistics.median(step["forward"] + step["backward"] for step in steps)
    if given.profile:
        profiles = {part: cProfile.Profile() for part in PARTS}
        for _ in range(given.rounds):
            timed.step(profiles)
        found["profile"] = {
            part: profile_text(made, given.profile, given.rounds * given.blocks)
            for part, made in profiles.items()
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
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--checkpoint", choices=checkpoints.MODES, default="none")
    options.add_argument(
        "--profile", type=int, default=0, help="functions to show of each part, by their own time"
    )
    given = options.parse_args()
    torch.autograd.set_multithreading_enabled(False)
    variants.allow_recompiles()
    has_gpu, is_first = torch.cuda.is_available(), int(os.environ.get("RANK", 0)) == 0
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_gpu else torch.device("cpu")
    figures: dict[str, dict[str, Any]] = {}
    baseline, *others = dict.fromkeys((ONLY[0], *given.only))
    with ranks.process_group(device):
        for name in (baseline, *others):
            figures[name] = measure(name, given, device)
        given.profile = 0
        figures[f"{baseline}, again"] = measure(baseline, given, device)
    for row in figures.values():
        row["over_bf16"] = row["both"] / figures[baseline]["both"]
    if is_first:
        for name, row in figures.items():
            for part, text in row.get("profile", {}).items():
                print(f"{name}, {part}: microseconds a block\n{text}\n")
        sharded = "unsharded" if given.unsharded else f"{ranks.world_size()} ranks"
        title = f"Host time, {given.blocks} blocks, {sharded}, checkpointing {given.checkpoint}"
        finish(given, figures, Table.of(title, figures.items(), COLUMNS))


if __name__ == "__main__":
    main()
