"""Figures of one GPU, in groups; each group is compared with what it could be at best, in the same run.

quantize: every Triton quantizer, in GB/s of the bytes it has to move and in per cent of what a copy reaches; beside it
the reference in eager code and compiled by Inductor. Before a quantizer is timed it is compared with the reference,
bitwise. Inputs are random, and three sets of them take turns, so that L2 holds none of the next. GPU times are those
of CUDA graphs, medians over rounds in which all variants take turns; host times are of launching, eagerly.

Without a CUDA device everything runs on the CPU, through the reference, to show that it runs: those figures are of no
kernel, and the table says so.

    python scripts/bench_gpu.py --group quantize --json bench_gpu.json
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from tables import Table, parser, write_json

from f8sub import ALL, Float8Format, Operand, ScaleRule, Tile
from f8sub.kernels import fused, reference
from f8sub.kernels.delayed import PastScale
from f8sub.kernels.delayed import quantize as quantize_delayed_reference

SHAPES = ["8192x4096", "8192x14336", "14336x4096", "8192x28672"]
"""x, dy and w of a Llama 8B's and 70B's MLP, over 8192 tokens."""

SETS = 3
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {
    "tensorwise": Float8Format(E4M3, Tile(ALL, ALL)),
    "rowwise": Float8Format(E4M3, Tile(1, ALL), ScaleRule.POWER_OF_2),
    "1x128": Float8Format(E4M3, Tile(1, 128), ScaleRule.POWER_OF_2),
    "1x128 float": Float8Format(E4M3, Tile(1, 128)),
    "128x128": Float8Format(E4M3, Tile(128, 128), ScaleRule.POWER_OF_2),
    "256x256": Float8Format(E4M3, Tile(256, 256)),
    "256x256 e5m2": Float8Format(E5M2, Tile(256, 256)),
}
USAGES = {"both": (True, True), "row": (True, False), "column": (False, True)}
READ_TWICE = {("tensorwise", name) for name in USAGES} | {("rowwise", "both"), ("rowwise", "column")}
"""Those whose amax spans more than a program reads: the matrix is read once for it and once to be cast."""


@dataclass(frozen=True)
class Bench:
    """Something to time.

    Attributes:
        name: of its row.
        run: by a tensor of a set.
        expected: what ``run`` is to equal, bitwise; None where there is nothing to compare.
        bytes: an element that it has to move to and from memory.
        inputs: what the sets hold: ``"x"``, matrices, or ``"codes"``, their rowwise codes in 128x128 tiles.
    """

    name: str
    run: Callable[[Any], Any]
    expected: Callable[[Any], Any] | None
    bytes: float
    inputs: str = "x"


def benches(device: torch.device, compiled: bool) -> list[Bench]:
    """The copy first, then every quantizer, then what it is compared with."""
    found = [Bench("copy", torch.clone, None, 4.0)]
    for name, format in FORMATS.items():
        for usage, (row, col) in USAGES.items():
            formats = format if row else None, format if col else None
            read = 4.0 if (name, usage) in READ_TWICE else 2.0
            moved = read + row + col
            found.append(
                Bench(
                    f"{name} {usage}", _of(fused.quantize, formats), _of(reference.quantize, formats), moved
                )
            )
        both = _of(reference.quantize, (format, format))
        moved = (4.0 if (name, "both") in READ_TWICE else 2.0) + 2.0
        found.append(Bench(f"{name} both, reference eager", both, None, moved))
        if compiled:
            found.append(Bench(f"{name} both, reference compiled", torch.compile(both), None, moved))
    past = PastScale(torch.ones(1, 1, device=device), 0.0, False)
    whole = FORMATS["tensorwise"]
    found.append(
        Bench(
            "scale of the past both",
            lambda x: fused.quantize_delayed(x, past, whole, whole)[:2],
            lambda x: quantize_delayed_reference(x, past, whole, whole)[:2],
            6.0,
        )
    )
    block = FORMATS["128x128"]
    found.append(
        Bench(
            "transpose of codes",
            lambda codes: (fused.derive_columnwise(codes, block),),
            lambda codes: (reference.derive_columnwise(codes, block),),
            2.0,
            "codes",
        )
    )
    return found


def _of(quantizer: Callable, formats: tuple) -> Callable[[torch.Tensor], Any]:
    return lambda x: quantizer(x, *formats)


def check(bench: Bench, given: Any) -> None:
    """That a bench's result is what is expected.

    Raises:
        RuntimeError: it is not; nothing of it would be worth timing.
    """
    if bench.expected is None:
        return
    for found, right in zip(bench.run(given), bench.expected(given), strict=True):
        if (found is None) != (right is None):
            raise RuntimeError(f"{bench.name} made another usage than the reference")
        if found is not None and right is not None and not same(found, right):
            raise RuntimeError(f"{bench.name} of {tuple(right.data.shape)} differs from the reference")


def same(a: Operand, b: Operand) -> bool:
    codes = torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
    return codes and torch.equal(a.scale_inv, b.scale_inv)


def captured(run: Callable, sets: Sequence[Any], pool: Any) -> Callable[[], float]:
    """Milliseconds a call of ``run``: a CUDA graph of one call a set, replayed once by each call.

    All graphs share the memory of ``pool``: their results are not looked at, and one runs at a time.
    """
    for given in sets:
        run(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for given in sets:
            run(given)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / len(sets)

    return replay


def timed_on_the_cpu(run: Callable, sets: Sequence[Any]) -> Callable[[], float]:
    def call() -> float:
        return launch_time(run, sets) / 1000.0

    return call


def launch_time(run: Callable, sets: Sequence[Any]) -> float:
    """Microseconds of the host a call, not waiting for what was launched."""
    begin = time.perf_counter()
    for given in sets:
        run(given)
    return (time.perf_counter() - begin) / len(sets) * 1e6


def measure(shape: tuple[int, int], device: torch.device, rounds: int, advance: Callable) -> dict[str, dict]:
    """Bench -> median and spread in ms, GB/s, share of the copy's, and microseconds of the host."""
    torch.manual_seed(0)
    sets = [torch.randn(shape, device=device).bfloat16() for _ in range(SETS)]
    block = FORMATS["128x128"]
    codes = [fused.quantize(x, block, None)[0] for x in sets]
    given = {"x": sets, "codes": codes}
    chosen = benches(device, compiled=device.type == "cuda")
    calls = {}
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for bench in chosen:
        check(bench, given[bench.inputs][0])
        if device.type == "cuda":
            calls[bench.name] = captured(bench.run, given[bench.inputs], pool)
        else:
            calls[bench.name] = timed_on_the_cpu(bench.run, given[bench.inputs])
        advance()
    times: dict[str, list[float]] = {bench.name: [] for bench in chosen}
    for _ in range(rounds):
        for bench in chosen:
            times[bench.name].append(calls[bench.name]())
    size = shape[0] * shape[1]
    results = {}
    for bench in chosen:
        median = statistics.median(times[bench.name])
        quarters = statistics.quantiles(times[bench.name], n=4)
        results[bench.name] = {
            "median_ms": median,
            "spread_ms": quarters[2] - quarters[0],
            "bytes_an_element": bench.bytes,
            "gb_per_s": bench.bytes * size / median / 1e6,
            "host_us": launch_time(bench.run, given[bench.inputs]),
        }
        if device.type == "cuda":
            torch.cuda.synchronize()
    for row in results.values():
        row["of_copy"] = row["gb_per_s"] / results["copy"]["gb_per_s"]
    return results


def quantize_group(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    figures = {}
    with Progress(disable=not sys.stderr.isatty()) as progress:
        total = len(arguments.shapes) * len(benches(device, compiled=device.type == "cuda"))
        task = progress.add_task("quantize", total=total)
        for text in arguments.shapes:
            rows, cols = map(int, text.split("x"))
            if device.type == "cuda":
                torch._dynamo.reset()
            figures[text] = measure((rows, cols), device, arguments.rounds, lambda: progress.advance(task))
    for text, results in figures.items():
        title = (
            f"quantize {text} bfloat16, {'GPU' if device.type == 'cuda' else 'CPU, through the reference'}"
        )
        columns = ("", "bytes/element", "ms", "spread", "GB/s", "of copy", "host us")
        lines = [
            (
                name,
                f"{row['bytes_an_element']:.0f}",
                f"{row['median_ms']:.4f}",
                f"{row['spread_ms']:.4f}",
                f"{row['gb_per_s']:.0f}",
                f"{row['of_copy']:.0%}",
                f"{row['host_us']:.0f}",
            )
            for name, row in results.items()
        ]
        Table(title, columns, lines).show()
    return figures


GROUPS = {"quantize": quantize_group}


def output_of(*command: str) -> str | None:
    """What a command prints; None where it does not run."""
    try:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures are of."""
    fields = "name,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,driver_version"
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "nvidia_smi": output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version(),
        "commit": output_of("git", "rev-parse", "HEAD"),
    }


def triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    version: str = triton.__version__
    return version


def main() -> None:
    arguments_parser = parser(__doc__)
    arguments_parser.add_argument("--group", choices=GROUPS, default="quantize")
    arguments_parser.add_argument("--shapes", nargs="+", default=SHAPES, help="rows x columns")
    arguments_parser.add_argument("--rounds", type=int, default=20)
    arguments = arguments_parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    before = machine(device)
    figures = GROUPS[arguments.group](arguments, device)
    if arguments.json:
        found = {"group": arguments.group, "before": before, "after": machine(device), "figures": figures}
        write_json(arguments.json, found)


if __name__ == "__main__":
    main()
