"""Where each millisecond of a training step goes: torchtitan's Llama 3 on GPUs, traced by torch.profiler.

Each arm is a run of torchtitan's command line as in titan.py. Its last steps are traced without the host's operators:
those would slow it, see titan_trace. The account is of the time from one optimizer step's end to the next one's, on
rank 0. Kernels are sorted by what they are for. "Alone" is communication beside which nothing else runs, and "idle" is
when nothing runs at all. "Host ahead" is how long before its start a kernel was launched: where the host is the limit,
that is microseconds. "Gaps" are times of 150 us or more in which no kernel but communication runs.

    python scripts/bench/budget.py --flavor 8B --steps 15 --skip 5 --json budget.json --arms "bf16 compiled"
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.bench import titan
from scripts.bench.timing import version_of
from scripts.table import Table, write_json

OPTIMIZER, BETWEEN_STEPS = r"FusedOptimizer|adam", 20e3
"""What the names of an optimizer's kernels have, and microseconds without any of them between two steps."""

KINDS = {
    "communication": r"nccl",
    "attention": r"flash|fmha|sdpa|attention",
    "GEMM": r"gemm|nvjet|xmma|cutlass|multiply_\w+|split_?k|add_parts",
    "optimizer and gradient norm": r"multi_tensor|adam|lpnorm|foreach|step_many|squares_of_many",
    "FSDP2's copies": r"split_with_sizes|chunk_cat|CatArray|pack|copy_chunks|Memcpy|Memset",
    "casts": r"^(quantize_|requantize_|cast_|transpose_codes|recast_|amax|scales_of_many|stage_amax)",
    "loss": r"softmax|nll_loss|cross_entropy|log_softmax|nll",
    "generated: norms, activations, casts": r"^triton_",
}
"""By what a kernel's name has; the first that fits. Inductor's casts are in the kernels that make what is cast."""

OTHER = "other"
GAP = 150.0
"""Microseconds from which on it counts that no kernel but communication runs."""
Interval = tuple[float, float]


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)), OTHER)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def account(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of one step by kind, from a trace's events."""
    kernels = one_step([e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")])
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    by_kind: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    spans: dict[bool, list[Interval]] = {True: [], False: []}
    ahead = []
    for kernel in kernels:
        kind = kind_of(kernel["name"])
        by_kind[kind] += kernel["dur"]
        counts[kind] += 1
        spans[kind == "communication"].append((kernel["ts"], kernel["ts"] + kernel["dur"]))
        if (when := launched.get(kernel["args"].get("correlation"))) is not None:
            ahead.append(kernel["ts"] - when)
    computing, both = union(spans[False]), union(spans[False] + spans[True])
    begin, end = both[0][0], both[-1][1]
    return {
        "step_ms": (end - begin) / 1e3,
        "ms": {kind: us / 1e3 for kind, us in by_kind.items()},
        "kernels": dict(counts),
        "alone_ms": (length(both) - length(computing)) / 1e3,
        "idle_ms": (end - begin - length(both)) / 1e3,
        "ahead_ms": [q / 1e3 for q in statistics.quantiles(ahead, n=20)],
        "late_share": sum(us < 50 for us in ahead) / max(len(ahead), 1),
        "gaps_ms": [gap / 1e3 for gap in gaps(computing)],
        "longest": longest(kernels),
    }


def tracing(arguments: argparse.Namespace) -> list[str]:
    """Torchtitan's options for a trace of the last two steps, of the GPU alone.

    Of one alone the trace may hold one optimizer step: where torchtitan logged the step before, the GPU had done it.
    """
    return [
        *("--profiling.enable_profiling", f"--profiling.profile_freq={arguments.steps}"),
        "--profiling.profiler_active=2",
        "--experimental.custom_import=scripts.bench.gpu.titan_trace",
    ]


def one_step(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those from the end of one optimizer step to the end of the next.

    Raises:
        ValueError: there are no two.
    """
    optimizer = sorted(
        (e["ts"], e["ts"] + e["dur"]) for e in kernels if re.search(OPTIMIZER, e["name"], re.IGNORECASE)
    )
    ends = [end for (_, end), (begin, _) in itertools.pairwise(optimizer) if begin - end > BETWEEN_STEPS]
    if not ends:
        raise ValueError("the trace has no two optimizer steps of a fused optimizer")
    begin, end = ends[-1], optimizer[-1][1]
    return [e for e in kernels if begin <= e["ts"] < end]


def gaps(busy: list[Interval]) -> list[float]:
    """The microseconds between intervals that are apart by GAP or more, in order."""
    apart = (begin - end for (_, end), (begin, _) in itertools.pairwise(busy))
    return [us for us in apart if us >= GAP]


def longest(kernels: list[dict[str, Any]], count: int = 60) -> list[tuple[str, int, float]]:
    """The kernels that take longest together: name, launches and milliseconds."""
    found: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        found[kernel["name"][:120]].append(kernel["dur"] / 1e3)
    ranked = sorted(found.items(), key=lambda item: -sum(item[1]))[:count]
    return [(name, len(times), sum(times)) for name, times in ranked]


def last_trace(folder: Path) -> list[dict[str, Any]]:
    """The events that rank 0 wrote last.

    Raises:
        ValueError: it wrote none.
    """
    traces = (folder / "run").glob("profile_traces/**/rank0_trace.json*")
    last = max(traces, key=lambda path: path.stat().st_mtime, default=None)
    if last is None:
        raise ValueError(f"{folder}: torchtitan wrote no trace")
    events: list[dict[str, Any]] = json.loads(last.read_text())["traceEvents"]
    return events


def traced(arguments: argparse.Namespace, arm: str, folder: Path) -> dict[str, Any]:
    """Train one arm, and account for the step that torchtitan traced."""
    return {**titan.run(arguments, arm, folder), **account(last_trace(folder))}


def table(found: dict[str, dict[str, Any]]) -> Table:
    """A row a kind, a column an arm."""
    kinds = [*KINDS, OTHER]
    rows: list[tuple[str, ...]] = [
        (kind, *(f"{of['ms'].get(kind, 0):.1f} ({of['kernels'].get(kind, 0)})" for of in found.values()))
        for kind in kinds
    ]
    for words, key in (
        ("communication alone", "alone_ms"),
        ("idle", "idle_ms"),
        ("step", "step_ms"),
    ):
        rows.append((words, *(f"{of[key]:.1f}" for of in found.values())))
    rows.append(("gaps", *(f"{sum(of['gaps_ms']):.1f} ({len(of['gaps_ms'])})" for of in found.values())))
    rows.append(("launched less than 50 us before", *(f"{of['late_share']:.0%}" for of in found.values())))
    rows.append(("host ahead, median", *(f"{of['ahead_ms'][9]:.1f}" for of in found.values())))
    return Table("one step, ms (kernels)", ("", *found), rows)


def main() -> None:
    from tests.integrations.torchtitan.gloo import make_assets

    arguments = titan.parsed(__doc__)
    arguments.more += tracing(arguments)
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        assets = Path(temporary) / "assets"
        assets.mkdir()
        make_assets(0, 1, assets)
        for arm in arguments.arms:
            folder = Path(temporary) / arm.replace(" ", "_")
            folder.mkdir()
            for name in ("tokenizer", "data"):
                (folder / name).symlink_to(assets / name)
            try:
                found[arm] = traced(arguments, arm, folder)
            except (RuntimeError, ValueError) as error:
                failed[arm] = str(error)
            if arguments.json:
                about = {"torchtitan": version_of("torchtitan"), "options": vars(arguments)}
                write_json(arguments.json, {"about": about, "figures": found, "failed": failed})
            print(
                f"{arm}: {found[arm]['tokens_per_second'] if arm in found else 'failed'}",
                file=sys.stderr,
                flush=True,
            )
    table(found).show()
    for arm, error in failed.items():
        print(f"FAILED {arm}: {error}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
