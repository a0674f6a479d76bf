"""Figures of one GPU, in groups; each group is compared with what it could be at best, in the same run.

quantize: every Triton quantizer, in GB/s and per cent of a copy's, beside the reference compiled by Inductor.
gemm: every float8 GEMM of every backend, in TFLOP/s, beside bf16's.
linear: one layer, forward and backward, at a Llama's shapes: bf16, torchao, TransformerEngine, f8sub, eager and
    compiled; time of the GPU and of the host, kernels, memory, errors.
experts: every grouped GEMM in TFLOP/s, and a layer's step of gate, up, SwiGLU and down: torch in bf16, torchao, f8sub.
experts_casts: casts of tokens by the expert they go to, as quantize, of balanced and of uneven groups.
slice: blocks of a Llama 3 8B under FSDP2, and the whole step with head, loss and AdamW: tokens/s, memory. Without
    FSDP2 that step as one CUDA graph, too: of few variants, or of those that --only names ("* graphed").
monitor: that whole step with a sample of f8sub.Monitor, and without; what one in 100 steps adds.

Results are checked before they are timed. Inputs are random, sets of them take turns, and so do variants; times are
medians with the distance of their quartiles. Without a CUDA device everything runs on the CPU, tiny, to show that it
runs: those figures are of no kernel, and the tables say so. What raises is left out of the tables, and the exit status
is 1.

    python scripts/bench_gpu.py --group quantize gemm --json bench_gpu.json
    python scripts/bench_gpu.py --group linear --shapes 8192x4096x14336 --only "f8sub rowwise*" "torchao*"
    torchrun --nproc-per-node 2 scripts/bench_gpu.py --group slice --only "f8sub tensorwise compiled"

Under torchrun the slice is sharded over all ranks, of which the first one's figures are shown; no steps are captured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Collection
from typing import Any

import torch

import f8sub
from scripts.bench.gpu import (
    checkpoints,
    expert_casts,
    expert_steps,
    experts,
    gemms,
    linears,
    monitors,
    quantizers,
    slices,
    variants,
)
from scripts.bench.gpu.session import Session
from scripts.bench.ranks import world_size
from scripts.bench.timing import machine
from scripts.table import parser, progress, write_json

GROUPS = {
    "quantize": quantizers.group,
    "gemm": gemms.group,
    "linear": linears.group,
    "experts": experts.group,
    "experts_casts": expert_casts.group,
    "slice": slices.group,
    "monitor": monitors.group,
}


def names_of(groups: Collection[str]) -> list[str]:
    """Names of the variants of these groups: experts have some that no other group has."""
    found = [variant.name for variant in variants.all_variants()] if set(groups) - {"experts"} else []
    return found + [variant.name for variant in expert_steps.variants()] * ("experts" in groups)


def parsed() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--group", nargs="+", choices=GROUPS, default=list(GROUPS))
    made.add_argument(
        "--shapes",
        nargs="+",
        help="of one group: rows x columns (quantize), tokens x K x experts (experts_casts), tokens x in x out (gemm, "
        "linear), experts x out x in x tokens (experts), tokens x blocks (others)",
    )
    made.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="variants of linear, slice and experts, glob patterns; bf16 always runs",
    )
    made.add_argument("--rounds", type=int, default=10, help="in which variants take turns")
    made.add_argument(
        "--checkpoint",
        choices=checkpoints.MODES,
        default="none",
        help="activation checkpointing of the slice's blocks: torchtitan's list, f8sub's policy, or all again",
    )
    made.add_argument("--tiny", action="store_true", help="sizes that a CPU takes, which are its default")
    arguments = made.parse_args()
    if arguments.rounds < 2:
        made.error("--rounds is at least 2: quartiles are of more than one")
    if world_size() > 1 and arguments.group != ["slice"]:
        made.error("under torchrun there is --group slice alone: the others are of one GPU")
    if arguments.shapes and len(arguments.group) > 1:
        made.error("--shapes are those of one --group")
    try:
        variants.match_each(arguments.only, names_of(arguments.group))
    except ValueError as error:
        made.error(str(error))
    return arguments


def main() -> None:
    arguments = parsed()
    has_gpu, is_first = torch.cuda.is_available(), int(os.environ.get("RANK", 0)) == 0
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_gpu else torch.device("cpu")
    found: dict[str, Any] = {"before": machine(device)}

    def save() -> None:
        if arguments.json and is_first:
            figures = {"figures": session.figures, "failed": session.failed}
            write_json(arguments.json, {**found, "after": machine(device), **figures})

    begins = progress() if is_first else contextlib.nullcontext(lambda what: None)
    # The same attention for every variant; which one, torch alone would decide by what ran before.
    with begins as begin, f8sub.prefer_cudnn_attention() as by_cudnn:
        found["attention"] = "cuDNN first" if by_cudnn else "torch's order"
        asked = {name: getattr(arguments, name) for name in ("rounds", "shapes", "only", "checkpoint")}
        tiny, ranks = arguments.tiny or not has_gpu, world_size()
        session = Session(device=device, tiny=tiny, ranks=ranks, begin=begin, save=save, **asked)
        for name in arguments.group:
            GROUPS[name](session)
    for table in session.tables if is_first else ():
        table.show()
    for what, error in session.failed.items():
        print(f"FAILED {what}: {error}", file=sys.stderr)
    sys.exit(1 if session.failed else 0)


if __name__ == "__main__":
    main()
