"""Measures GEMMs of operands with scales of blocks on this GPU: cuBLASLt's and ours in every candidate's tiles.

Right first: every candidate multiplies, in a process of its own with a time limit, so that a kernel that hangs or
crashes costs only itself; those processes compile all candidates side by side. Products are compared with float64 on
the GPU, in units of a budget derived from the tensor core's accumulator. Then speed:
random data, two sets of operands in turn, CUDA graphs, medians of rounds in which all variants take turns. Of few rows
a plain split-K kernel is timed as well.

Writes ``f8sub/kernels/gemm/gemm_tables/GPU.json``, by which ``f8sub.kernels.gemm.select`` chooses from then on, and
prints a table last.

    python scripts/tune_gemm.py
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import torch
from rich.progress import Progress

from f8sub import Float8Format, Operand, Tile
from f8sub.kernels import reference
from f8sub.kernels.gemm import block_scales, blockwise, scaled_mm, tuning
from f8sub.kernels.triton.gemm_launch import Config
from scripts.bench.formats import E4M3, FORMATS
from scripts.bench.split_k import SplitK
from scripts.bench.timing import Run, by_graph, in_turns, machine, summary
from scripts.table import Table, parser, write_json

VECTOR, SQUARE = Float8Format(E4M3, Tile(1, 128)), Float8Format(E4M3, Tile(128, 128))
GRID, GRID_E5M2 = FORMATS["256x256"], FORMATS["256x256 e5m2"]
PAIRS = {
    "1x128 x 128x128": (VECTOR, SQUARE),
    "1x128 x 1x128": (VECTOR, VECTOR),
    "256x256 x 256x256": (GRID, GRID),
    "256x256 e5m2 x 256x256": (GRID_E5M2, GRID),
}
MANY_ROWS = ["8192x8192x8192", "8192x4096x14336", "8192x14336x4096", "14336x8192x4096"]
SHAPES = [*MANY_ROWS, "64x8192x8192", "16x8192x8192"]
"""M x K x N."""

CHECKED = {False: [(520, 1040, 392), (4200, 2304, 2200)], True: [(40, 1040, 392), (64, 4096, 1040)]}
"""M, K, N that tiles and blocks do not divide, of many rows and of few; the large ones have programs make two tiles."""

STEP = 32
"""float8 products that one instruction of Hopper's tensor cores adds to an accumulator."""

SETS = 2
SECONDS = 90
"""What a process may take to start, compile and check a candidate before that counts as hanging."""


def configs() -> list[Config]:
    """The tiles to choose from: of many rows, then of few."""
    persistent = [Config(128, 256, 4, persistent=True, group=group) for group in (16, 8, 32)]
    few = [Config(64, cols, stages, group=1) for cols, stages in ((32, 8), (64, 6), (64, 8), (128, 6))]
    return [*persistent, *few, *(Config(64, cols, 6, group=1, parts=2) for cols in (64, 128))]


@dataclass(frozen=True)
class Candidate:
    """A kernel of ours for a pair of formats; ``few`` says for which class of shapes."""

    pair: str
    config: Config
    few: bool


def candidates(pairs: list[str], few: set[bool]) -> list[Candidate]:
    """All of the classes of shapes in ``few``."""
    found = [
        Candidate(pair, config, config.rows <= tuning.FEW_ROWS) for pair in pairs for config in configs()
    ]
    return [candidate for candidate in found if candidate.few in few]


def made(shape: tuple[int, int, int], pair: str, seed: int, device: str = "cuda") -> tuple[Operand, Operand]:
    """Operands of gaussian codes, under scales over three octaves, which are laid out as quantizers do."""
    torch.manual_seed(seed)
    rows, depth, cols = shape
    operands = []
    for format, lines in zip(PAIRS[pair], (rows, cols), strict=True):
        values = torch.randn(lines, depth, device=device) * (40.0 if format.dtype == E4M3 else 2000.0)
        scales = block_scales.empty_scale_inv(values, format, lines, depth)
        scales.copy_((torch.rand(scales.shape, device=device) * 3).exp2() / 1000)
        operands.append(Operand(values.to(format.dtype), scales, format))
    return operands[0], operands[1]


def excess(found: torch.Tensor, a: Operand, b: Operand, only: slice) -> float:
    """Largest error of some rows, in units of what ``tests/budgets.py`` allows, of which this is the same bound.

    A tensor core's step adds 32 products to an accumulator; each of the 33 may lose 2**-12 of the largest, which the
    largest codes of both lines bound. Blocks of 128 are then added in float32, and the sum is rounded once.
    """
    left = reference.dequantize(a, torch.float64)[only]
    right = reference.dequantize(b, torch.float64)
    exact, budget = torch.zeros(2, len(left), len(right), dtype=torch.float64, device=left.device)
    for start in range(0, a.data.shape[1], STEP):
        if start % 128 == 0:
            accumulator = torch.zeros_like(exact)
        parts = left[:, start : start + STEP], right[:, start : start + STEP]
        largest = parts[0].abs().amax(1)[:, None] * parts[1].abs().amax(1)[None]
        largest = torch.maximum(largest, accumulator.abs())
        step = parts[0] @ parts[1].t()
        accumulator += step
        exact += step
        budget += (STEP + 1) * 2.0**-12 * torch.maximum(largest, accumulator.abs())
    budget += (a.data.shape[1] + 4) * 2.0**-23 * (left.abs() @ right.abs().t())
    budget += torch.finfo(found.dtype).eps / 2 * (exact.abs() + budget)
    error = (found[only].double() - exact).abs()
    return float((error / budget).max()) if bool(error.isfinite().all()) else math.inf


def check(candidate: Candidate, shapes: list[tuple[int, int, int]]) -> float:
    """The worst of ``excess``: all rows where no tile divides the matrices, every 61st of those that are timed."""
    worst = 0.0
    for shape in CHECKED[candidate.few] + shapes:
        a, b = made(shape, candidate.pair, 3)
        only = slice(None, None, 61 if shape in shapes else 1)
        for dtype in (torch.bfloat16,) if shape in shapes else (torch.float32, torch.bfloat16):
            for _ in range(2):
                found = blockwise.multiply(a, b, dtype, candidate.config)
                worst = max(worst, excess(found, a, b, only))
    return worst


def serve(connection: Connection, candidate: Candidate, shapes: list[tuple[int, int, int]]) -> None:
    try:
        connection.send(check(candidate, shapes))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {str(error)[:300]}")


def checked_alone(candidate: Candidate, shapes: list[tuple[int, int, int]]) -> float | str:
    """What ``check`` finds in a process of its own; a reason where that died or took too long."""
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    alike = [shape for shape in shapes if (shape[0] <= tuning.FEW_ROWS) is candidate.few]
    process = context.Process(target=serve, args=(other, candidate, alike), daemon=True)
    process.start()
    other.close()
    try:
        result: float | str = f"no result in {SECONDS} seconds"
        return connection.recv() if connection.poll(SECONDS) else result
    except EOFError:
        return "its process died"
    finally:
        process.kill()
        process.join()


def checked(
    chosen: list[Candidate], shapes: list[tuple[int, int, int]], jobs: int
) -> dict[Candidate, float | str]:
    """What ``check`` finds of each, ``jobs`` of them at a time."""
    with ThreadPoolExecutor(jobs) as pool, Progress(disable=not sys.stderr.isatty()) as progress:
        results = pool.map(functools.partial(checked_alone, shapes=shapes), chosen)
        shown = progress.track(results, total=len(chosen), description="compile and check")
        return dict(zip(chosen, shown, strict=True))


def timed(
    pair: str, shape: tuple[int, int, int], right: list[Config], rounds: int
) -> dict[str, dict[str, float]]:
    """Variant -> median and spread in microseconds, TFLOP/s, and GB/s of what has to be read and written."""
    sets = [made(shape, pair, seed) for seed in range(SETS)]
    runs: dict[str, Run] = {}
    if scaled_mm.why_not(*PAIRS[pair], torch.device("cuda")) is None:
        runs["scaled_mm"] = lambda given: scaled_mm.gemm_nt(*given, torch.bfloat16, False)
    for config in right:
        runs[str(config)] = lambda given, config=config: blockwise.multiply(*given, torch.bfloat16, config)
    if shape[0] <= tuning.FEW_ROWS:
        for split in (4, 8):
            runs[f"plain split-K, {split}"] = SplitK(split)
    pool = torch.cuda.graph_pool_handle()
    repeats = 1 if shape[0] > tuning.FEW_ROWS else 5

    def timer(run: Run) -> Callable[[], float]:
        replay = by_graph(run, sets, pool)
        return lambda: min(replay() for _ in range(repeats)) * 1e3

    rows, depth, cols = shape
    moved = rows * depth + cols * depth + 2 * rows * cols
    found = {}
    for name, times in in_turns({name: timer(run) for name, run in runs.items()}, rounds).items():
        us, spread = summary(times, "us").values()
        tflops, gb_per_s = 2e-6 * rows * depth * cols / us, moved / us / 1e3
        found[name] = {"us": us, "spread_us": spread, "tflops": tflops, "gb_per_s": gb_per_s}
    return found


def product(
    pair: str, shape: tuple[int, int, int], figures: dict[str, dict[str, float]], right: list[Config]
) -> dict:
    """What ``gemm_table`` keeps of one product."""
    ours = {str(config): config for config in right}
    rated = [name for name in figures if name in ours]
    best = max(rated, key=lambda name: figures[name]["tflops"], default=None)
    measured = {"scaled_mm": figures.get("scaled_mm"), "triton": figures.get(best)}
    rates = {backend: round(of["tflops"], 1) for backend, of in measured.items() if of is not None}
    formats = dict(zip("ab", map(tuning.kind, PAIRS[pair]), strict=True))
    config = None if best is None else asdict(ours[best])
    return {**formats, "shape": shape, "rates": rates, "config": config, "variants": figures}


def show(products: list[dict], results: dict[Candidate, float | str]) -> None:
    names = {tuple(map(tuning.kind, formats)): pair for pair, formats in PAIRS.items()}
    rows = []
    for row in products:
        title = f"{names[row['a'], row['b']]}, {'x'.join(map(str, row['shape']))}"
        best = max(row["variants"].values(), key=lambda figures: figures["tflops"])
        for name, figures in sorted(row["variants"].items(), key=lambda item: item[1]["us"]):
            rows.append((f"{title}: {name}{' <' if figures is best else ''}", figures))
    columns = (
        ("us", "{us:.1f}"),
        ("spread", "{spread_us:.1f}"),
        ("TFLOP/s", "{tflops:.0f}"),
        ("GB/s", "{gb_per_s:.0f}"),
    )
    wrong = [
        f"{candidate.pair}, {candidate.config}: {result if isinstance(result, str) else f'{result:.2f} budgets'}"
        for candidate, result in results.items()
        if isinstance(result, str) or result > 1
    ]
    largest = max((result for result in results.values() if isinstance(result, float)), default=math.nan)
    Table.of("M x K x N, bfloat16 results", rows, columns).show()
    print("\n".join(["not right, and not timed:", *wrong]) if wrong else "every candidate is right", end="; ")
    print(f"largest error in budgets: {largest:.3f}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+", default=SHAPES, help="M x K x N")
    options.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=PAIRS)
    options.add_argument("--rounds", type=int, default=60)
    jobs = min(os.cpu_count() or 1, 14)
    options.add_argument("--jobs", type=int, default=jobs, help="processes that check")
    options.add_argument("--out", help="write the table there, not into the package")
    arguments = options.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reason := blockwise.why_not(VECTOR, SQUARE, device):
        sys.exit(f"the kernels to be measured: triton {reason}")
    shapes = [tuple(map(int, text.split("x"))) for text in arguments.shapes]
    few = {shape[0] <= tuning.FEW_ROWS for shape in shapes}
    before, begun = machine(device), time.monotonic()
    results = checked(candidates(arguments.pairs, few), shapes, arguments.jobs)
    print(f"{len(results)} candidates compiled and checked in {time.monotonic() - begun:.0f} s", flush=True)
    products = []
    for pair in arguments.pairs:
        for shape in shapes:
            alike = [c for c in results if c.pair == pair and c.few == (shape[0] <= tuning.FEW_ROWS)]
            right = [c.config for c in alike if not isinstance(results[c], str) and results[c] <= 1]
            row = product(pair, shape, timed(pair, shape, right, arguments.rounds), right)
            products.append(row)
            seconds = time.monotonic() - begun
            print(f"{seconds:4.0f} s  {pair} {shape}: {row['rates']} {row['config']}", flush=True)
    gpu = torch.cuda.get_device_name()
    path = arguments.out or tuning.file_of(gpu)
    document = {"gpu": gpu, "before": before, "after": machine(device), "products": products}
    tuning.FOLDER.mkdir(exist_ok=True)
    for file in filter(None, (path, arguments.json)):
        write_json(file, document)
    show(products, results)
    print(f"{path}, after {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
