"""Measures GEMMs of float8 operands on this GPU: every candidate's tiles, beside torch's own products.

Right first: every candidate multiplies, in a process of its own with a time limit, so that a kernel that hangs or
crashes costs only itself; those processes compile all candidates side by side. Then speed: random data, two sets of
operands in turn, CUDA graphs, medians of rounds in which all variants take turns. A table comes last.

``dense``, which runs where none is named, are GEMMs of operands with scales of blocks, and of whole tensors: those by
cuBLASLt's kernel for them and by torch's for scales by row. Products of blocks are compared with float64 on the GPU, in
units of a budget derived from the tensor core's accumulator. Of few rows a plain split-K kernel is timed as well. It
writes ``f8sub/kernels/gemm/gemm_tables/GPU.json``, by which ``f8sub.kernels.gemm.select`` chooses from then on; what
the file has of other pairs of formats stays.

``grouped`` are products by groups, of experts. Right are those, as those of whole tensors, within 40 dB of the product
of the codes in float32, 25 dB where sums stay in the tensor cores' accumulators. It prints the best tiles of each kind
and shape.

    python scripts/tune_gemm.py
    python scripts/tune_gemm.py dense --pairs tensor e5m2-tensor
    python scripts/tune_gemm.py grouped --json grouped.json
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.progress import Progress

import f8sub
from f8sub import ALL, Float8Format, Operand, Tile
from f8sub.kernels import reference
from f8sub.kernels.gemm import block_scales, blockwise, measured, scaled_mm, tuning
from f8sub.kernels.gemm.select import GROUPED
from f8sub.kernels.gemm.tuning import GroupedConfig, Rows
from f8sub.kernels.grouped import gemm as grouped_gemm
from f8sub.kernels.grouped.operands import Groups
from f8sub.kernels.triton.gemm_launch import Config
from scripts.bench.formats import E4M3, E5M2, FORMATS
from scripts.bench.gpu.expert_steps import LIES, Lie
from scripts.bench.gpu.experts import FAST_FLOOR_DB, FLOOR_DB, Problem, Product
from scripts.bench.gpu.experts import SHAPES as GROUPED_SHAPES
from scripts.bench.split_k import SplitK
from scripts.bench.timing import Run, by_graph, in_turns, machine, sqnr, summary
from scripts.table import Table, write_json

JOBS = min(os.cpu_count() or 1, 14)
SETS = 2
SECONDS = 120
"""What a process may take to start, compile and check a candidate before that counts as hanging."""

Figures = dict[str, dict[str, float]]
"""Variant -> median and spread in microseconds, TFLOP/s, and GB/s where that is counted."""

COLUMNS = (
    ("us", "{us:.1f}"),
    ("spread", "{spread_us:.1f}"),
    ("TFLOP/s", "{tflops:.0f}"),
    ("GB/s", "{gb_per_s:.0f}"),
)


def serve(connection: Connection, candidate: Any) -> None:
    try:
        connection.send(candidate.check())
    except Exception as error:
        connection.send(f"{type(error).__name__}: {str(error)[:300]}")


def checked_alone(candidate: Any) -> float | str:
    """What ``check`` finds in a process of its own; a reason where that died or took too long."""
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    process = context.Process(target=serve, args=(other, candidate), daemon=True)
    process.start()
    other.close()
    try:
        return connection.recv() if connection.poll(SECONDS) else f"no result in {SECONDS} seconds"
    except EOFError:
        return "its process died"
    finally:
        process.kill()
        process.join()


def checked(candidates: Sequence[Any], jobs: int) -> dict[Any, float | str]:
    """What ``check`` finds of each, ``jobs`` of them at a time."""
    with ThreadPoolExecutor(jobs) as pool, Progress(disable=not sys.stderr.isatty()) as progress:
        results = pool.map(checked_alone, candidates)
        shown = progress.track(results, total=len(candidates), description="compile and check")
        return dict(zip(candidates, shown, strict=True))


def rated(
    timers: Mapping[str, Callable[[], float]], rounds: int, tflop: float, moved: int | None = None
) -> Figures:
    """What timers in milliseconds read in turns; ``moved`` are the bytes that have to be read and written."""
    found: Figures = {}
    for name, times in in_turns(timers, rounds).items():
        us, spread = (1e3 * ms for ms in summary(times).values())
        found[name] = {"us": us, "spread_us": spread, "tflops": tflop / us * 1e6}
        if moved is not None:
            found[name]["gb_per_s"] = moved / us / 1e3
    return found


def tune(
    gemms: Sequence[BlockGemm | WholeGemm] | Sequence[GroupedGemm], rounds: int, jobs: int, json: str | None
) -> dict[str, Any]:
    """Check all candidates, time and show those that are right, and write the file after each GEMM."""
    device = torch.device("cuda")
    document = {"gpu": torch.cuda.get_device_name(), "before": machine(device), "products": []}
    begun = time.monotonic()
    results = checked(list(dict.fromkeys(each for gemm in gemms for each in gemm.candidates)), jobs)
    print(f"{len(results)} candidates compiled and checked in {time.monotonic() - begun:.0f} s", flush=True)
    wrong = {each: result for each, result in results.items() if isinstance(result, str) or not result <= 1}
    rows = []
    for gemm in gemms:
        right = [each for each in gemm.candidates if each not in wrong]
        try:
            figures = gemm.timed(right, rounds)
        except RuntimeError as error:
            print(f"FAILED {gemm.name}: {error}", file=sys.stderr)
            continue
        if not figures:
            continue
        best = max(figures, key=lambda name: figures[name]["tflops"])
        for name, of in sorted(figures.items(), key=lambda item: item[1]["us"]):
            rows.append((f"{gemm.name}: {name}{' <' * (name == best)}", of))
        document["products"].append(gemm.entry(figures, right))
        document["after"] = machine(device)
        if json:
            write_json(json, document)
        seconds, tflops = time.monotonic() - begun, figures[best]["tflops"]
        print(f"{seconds:4.0f} s  {gemm.name}: {best}, {tflops:.0f} TFLOP/s", flush=True)
    Table.of("bfloat16 results", rows, COLUMNS).show()
    for each, result in wrong.items():
        why = result if isinstance(result, str) else f"{result:.2f} budgets"
        print(f"not right, and not timed: {each}: {why}")
    largest = max((result for result in results.values() if isinstance(result, float)), default=math.nan)
    print(f"{len(results) - len(wrong)} candidates are right; largest error in budgets: {largest:.3f}")
    return document


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


def configs() -> list[Config]:
    """The tiles to choose from: of many rows, then of few."""
    persistent = [Config(128, 256, 4, persistent=True, group=group) for group in (16, 8, 32)]
    few = [Config(64, cols, stages, group=1) for cols, stages in ((32, 8), (64, 6), (64, 8), (128, 6))]
    return [*persistent, *few, *(Config(64, cols, 6, group=1, parts=2) for cols in (64, 128))]


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


@dataclass(frozen=True)
class BlockTiles:
    """A kernel of ours for a pair of formats, and the shapes that it is checked at."""

    pair: str
    config: Config
    shapes: tuple[tuple[int, int, int], ...]

    def check(self) -> float:
        """The worst of ``excess``: all rows where no tile divides the matrices, every 61st of those that are timed."""
        worst = 0.0
        for shape in (*CHECKED[self.config.rows <= tuning.FEW_ROWS], *self.shapes):
            a, b = made(shape, self.pair, 3)
            only = slice(None, None, 61 if shape in self.shapes else 1)
            for dtype in (torch.bfloat16,) if shape in self.shapes else (torch.float32, torch.bfloat16):
                for _ in range(2):
                    found = blockwise.multiply(a, b, dtype, self.config)
                    worst = max(worst, excess(found, a, b, only))
        return worst


@dataclass(frozen=True)
class BlockGemm:
    """A GEMM of operands with scales of blocks; ``shapes`` are all that are timed."""

    pair: str
    shape: tuple[int, int, int]
    shapes: tuple[tuple[int, int, int], ...] = ()

    @property
    def few(self) -> bool:
        """Whether it is of the class of few rows."""
        return self.shape[0] <= tuning.FEW_ROWS

    @property
    def name(self) -> str:
        """Of its rows."""
        return f"{self.pair}, {'x'.join(map(str, self.shape))}"

    @property
    def candidates(self) -> list[BlockTiles]:
        """Tiles for its class of shapes."""
        shapes = tuple(shape for shape in self.shapes if (shape[0] <= tuning.FEW_ROWS) is self.few)
        found = [config for config in configs() if (config.rows <= tuning.FEW_ROWS) is self.few]
        return [BlockTiles(self.pair, config, shapes) for config in found]

    def timed(self, right: Sequence[BlockTiles], rounds: int) -> Figures:
        """Beside cuBLASLt's, and a plain split-K kernel of few rows."""
        sets = [made(self.shape, self.pair, seed) for seed in range(SETS)]
        runs: dict[str, Run] = {}
        if scaled_mm.why_not(*PAIRS[self.pair], torch.device("cuda")) is None:
            runs["scaled_mm"] = lambda given: scaled_mm.gemm_nt(*given, torch.bfloat16, False)
        for config in (each.config for each in right):
            runs[str(config)] = lambda given, config=config: blockwise.multiply(
                *given, torch.bfloat16, config
            )
        if self.few:
            runs |= {f"plain split-K, {split}": SplitK(split) for split in (4, 8)}
        pool = torch.cuda.graph_pool_handle()

        def timer(run: Run) -> Callable[[], float]:
            replay = by_graph(run, sets, pool)
            return lambda: min(replay() for _ in range(5 if self.few else 1))

        rows, depth, cols = self.shape
        moved = rows * depth + cols * depth + 2 * rows * cols
        timers = {name: timer(run) for name, run in runs.items()}
        return rated(timers, rounds, 2e-12 * rows * depth * cols, moved)

    def entry(self, figures: Figures, right: Sequence[BlockTiles]) -> dict[str, Any]:
        """What ``gemm_table`` keeps of one product."""
        ours = {str(each.config): each.config for each in right}
        best = max(
            (name for name in figures if name in ours), key=lambda name: figures[name]["tflops"], default=None
        )
        measured = {"scaled_mm": figures.get("scaled_mm"), "triton": figures.get(best)}
        rates = {backend: round(of["tflops"], 1) for backend, of in measured.items() if of is not None}
        formats = dict(zip("ab", map(tuning.kind, PAIRS[self.pair]), strict=True))
        config = None if best is None else asdict(ours[best])
        return {**formats, "shape": self.shape, "rates": rates, "config": config, "variants": figures}


TENSOR, TENSOR_E5M2 = (Float8Format(dtype, Tile(ALL, ALL)) for dtype in (E4M3, E5M2))
WHOLE = {"tensor": (TENSOR, TENSOR, True), "e5m2-tensor": (TENSOR_E5M2, TENSOR, False)}
"""Pairs of whole tensors, and with which accumulation: y of ``tensorwise``, and its dx and dw."""

WHOLE_SHAPES = {
    "tensor": (
        *("8192x4096x1024", "8192x4096x4096", "8192x4096x14336", "8192x14336x4096"),
        *("2048x4096x1024", "2048x4096x4096", "2048x4096x14336", "2048x14336x4096"),
        *("512x4096x4096", "512x4096x14336", "512x14336x4096"),
        *("8192x2048x2048", "8192x8192x8192", "8192x8192x28672", "8192x28672x8192"),
    ),
    "e5m2-tensor": (
        *("8192x1024x4096", "8192x4096x4096", "8192x14336x4096", "8192x4096x14336"),
        *("1024x8192x4096", "4096x8192x4096", "14336x8192x4096", "4096x8192x14336"),
        *("2048x4096x4096", "4096x2048x4096", "8192x8192x8192"),
    ),
}
"""M x K x N: layers of a Llama 3 8B with 8192 tokens and with fewer, of a smaller model, and of a 70B."""


@dataclass(frozen=True)
class WholeKernel:
    """One of ``measured.KERNELS`` for a pair of whole tensors."""

    pair: str
    name: str

    def __call__(self, operands: tuple[Operand, Operand]) -> torch.Tensor:
        """The product, in bf16."""
        return measured.KERNELS[self.name](*operands, torch.bfloat16, WHOLE[self.pair][2])

    def check(self) -> float:
        """An error below the SQNR that a right one has, of a shape that is filled up and of one that is not."""
        floor = FAST_FLOOR_DB if WHOLE[self.pair][2] else FLOOR_DB
        worst = 0.0
        for shape in ((520, 1040, 392), (4096, 4096, 1024)):
            operands = whole(shape, self.pair, 3)
            right = reference.gemm_nt(*operands, torch.float32, False)
            worst = max(worst, 10 ** ((floor - sqnr(self(operands), right)) / 20))
        return worst


def whole(shape: tuple[int, int, int], pair: str, seed: int, device: str = "cuda") -> tuple[Operand, Operand]:
    """Operands of a product, (M, K) and (N, K), cast from gaussian values."""
    torch.manual_seed(seed)
    rows, depth, cols = shape
    values = (torch.randn(lines, depth, device=device, dtype=torch.bfloat16) for lines in (rows, cols))
    a, b = (
        reference.quantize(each, format, None).rowwise
        for each, format in zip(values, WHOLE[pair], strict=False)
    )
    return a, b


@dataclass(frozen=True)
class WholeGemm:
    """A GEMM of two operands with one scale each."""

    pair: str
    shape: tuple[int, int, int]

    @property
    def name(self) -> str:
        """Of its rows."""
        return f"{self.pair}, {'x'.join(map(str, self.shape))}"

    @property
    def candidates(self) -> list[WholeKernel]:
        """CuBLASLt's, and torch's by row."""
        return [WholeKernel(self.pair, name) for name in ("scaled_mm", "by_row")]

    def timed(self, right: Sequence[WholeKernel], rounds: int) -> Figures:
        """With what repeats scales by row."""
        sets = [whole(self.shape, self.pair, seed) for seed in range(SETS)]
        pool = torch.cuda.graph_pool_handle()
        timers = {each.name: by_graph(each, sets, pool) for each in right}
        return rated(timers, rounds, 2e-12 * math.prod(self.shape))

    def entry(self, figures: Figures, right: Sequence[WholeKernel]) -> dict[str, Any]:
        """What ``gemm_table`` keeps of one product."""
        *pair, fast_accum = WHOLE[self.pair]
        formats = dict(zip("ab", map(tuning.kind, pair), strict=True))
        rates = {name: round(of["tflops"], 1) for name, of in figures.items()}
        of = {"shape": self.shape, "fast_accum": fast_accum, "rates": rates, "config": None}
        return {**formats, **of, "variants": figures}


KINDS = {
    "rowwise": ("fprop", "dgrad", "wgrad"),
    "tensorwise": ("fprop", "dgrad", "wgrad"),
    "blockwise": ("fprop", "wgrad"),
    "gridquant": ("fprop",),
}
"""Recipes, and those of their GEMMs whose kernels or shapes differ."""

GROUPED_CHECKED = "4x384x640x1040"
"""Experts x out x in x tokens, of which tiles are ragged at every edge."""


def grouped_configs(spec: Any, over_rows: bool) -> list[GroupedConfig]:
    """Four to eight for a kind of product."""
    tile = spec.b.tile
    passes = (1,) if tile.rows == 1 and tile.cols != ALL else (1, 2) if over_rows else (1, 2, 4)
    persistent = [
        GroupedConfig(128, 256, 4, persistent=True, group=group, blocks=blocks)
        for blocks in passes
        for group in ((16,) if blocks != passes[-1] else (4, 8, 16))
    ]
    return [*persistent, GroupedConfig(128, 128, 4), GroupedConfig(64, 128, 5, warps=4)]


class InTiles(Product):
    """A product by our kernels in given tiles."""

    def __init__(self, problem: Problem, spec: Any, groups: Groups, config: GroupedConfig) -> None:
        super().__init__(problem, spec, "triton", groups)
        self.config = config

    def __call__(self, operands: tuple[Any, Any]) -> torch.Tensor:
        """The product, in bf16."""
        a, b = operands
        how = torch.bfloat16, self.spec.fast_accum, self.config
        groups = a.groups if self.problem.gemm == "wgrad" else self.groups
        rows = Rows(groups.first, groups.ends, a.groups.first, groups.rows)
        if self.problem.gemm != "wgrad":
            left, right = Operand(a.data, a.scale_inv, a.format), Operand(b.data, b.scale_inv, b.format)
            return grouped_gemm.triton_by_rows(left, right, rows, *how)
        left, right = (
            Operand(t.data, t.scale_inv if t.edge == ALL else t.scale_inv.t(), t.format) for t in (a, b)
        )
        return grouped_gemm.triton_over_rows(left, right, rows, *how)


def problem_of(text: str, gemm: str, lie: str) -> Problem:
    experts, n, k, tokens = map(int, text.split("x"))
    return Problem(gemm, (experts, n, k, tokens), Lie.of(lie, experts, tokens))


@dataclass(frozen=True)
class GroupedTiles:
    """A kernel for one GEMM of a recipe; None as tiles is torch's own product."""

    recipe: str
    gemm: str
    config: GroupedConfig | None

    @property
    def name(self) -> str:
        """Of its row."""
        return "scaled_grouped_mm" if self.config is None else str(self.config)

    def product(self, problem: Problem, groups: Groups) -> Product:
        """It, over some groups."""
        spec = getattr(f8sub.get_recipe(self.recipe), self.gemm)
        if self.config is None:
            return Product(problem, spec, "scaled_grouped_mm", groups)
        return InTiles(problem, spec, groups, self.config)

    def check(self) -> float:
        """Of a small product; an error below the SQNR that a right one has."""
        device = torch.device("cuda")
        problem = problem_of(GROUPED_CHECKED, self.gemm, "zipf")
        torch.manual_seed(0)
        product = self.product(problem, problem.lie.groups(device))
        floor = FAST_FLOOR_DB if product.spec.fast_accum else FLOOR_DB
        return 10 ** ((floor - product.sqnr(product.operands(*problem.given(device)))) / 20)


@dataclass(frozen=True)
class GroupedGemm:
    """One GEMM of a recipe, over groups."""

    recipe: str
    problem: Problem

    @property
    def name(self) -> str:
        """Of its rows."""
        return f"{self.recipe} {self.problem.name}"

    @property
    def candidates(self) -> list[GroupedTiles]:
        """Our tiles, and torch's product where that takes the formats."""
        gemm = self.problem.gemm
        spec = getattr(f8sub.get_recipe(self.recipe), gemm)
        found: list[GroupedConfig | None] = [*grouped_configs(spec, gemm == "wgrad")]
        if GROUPED["scaled_grouped_mm"].why_not(spec.a, spec.b, torch.device("cuda")) is None:
            found.append(None)
        return [GroupedTiles(self.recipe, gemm, config) for config in found]

    def timed(self, right: Sequence[GroupedTiles], rounds: int) -> Figures:
        """All of them, each with operands that are laid out as it takes them."""
        device = torch.device("cuda")
        torch.manual_seed(0)
        groups = self.problem.lie.groups(device)
        sets = [self.problem.given(device) for _ in range(SETS)]
        pool = torch.cuda.graph_pool_handle()
        laid_out: dict[int, list] = {}
        timers: dict[str, Callable[[], float]] = {}
        for each in right:
            product = each.product(self.problem, groups)
            multiple = GROUPED[product.backend].multiple
            if multiple not in laid_out:
                laid_out[multiple] = [product.operands(*given) for given in sets]
            timers[each.name] = by_graph(product, laid_out[multiple], pool)
        return rated(timers, rounds, self.problem.tflop)

    def entry(self, figures: Figures, right: Sequence[GroupedTiles]) -> dict[str, Any]:
        """The tiles of the best, None for torch's product, and all figures."""
        best = max(right, key=lambda each: figures[each.name]["tflops"], default=None)
        config = None if best is None or best.config is None else asdict(best.config)
        return {"recipe": self.recipe, "product": self.problem.name, "best": config, "variants": figures}


def require(why_not: Callable[..., str | None], *formats: Float8Format | None) -> None:
    """End here where our kernels do not run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reason := why_not(*formats, device):
        sys.exit(f"the kernels to be measured: triton {reason}")


@dataclass(frozen=True)
class Dense:
    """GEMMs of operands with scales of blocks, and of whole tensors; writes the table of this GPU."""

    shapes: tuple[str, ...] | None = None  # M x K x N; None for those of each pair
    pairs: tuple[Literal[tuple(PAIRS | WHOLE)], ...] = tuple(PAIRS | WHOLE)
    rounds: int = 60
    jobs: int = JOBS  # processes that check
    out: str | None = None  # write the table there, not into the package
    json: str | None = None  # also write the figures here

    def gemms(self) -> list[BlockGemm | WholeGemm]:
        """All that is timed."""
        found: list[BlockGemm | WholeGemm] = []
        for pair in self.pairs:
            texts = self.shapes or (WHOLE_SHAPES[pair] if pair in WHOLE else SHAPES)
            shapes = tuple(tuple(map(int, text.split("x"))) for text in texts)
            for shape in shapes:
                found.append(WholeGemm(pair, shape) if pair in WHOLE else BlockGemm(pair, shape, shapes))
        return found

    def run(self) -> None:
        """Tune, and write."""
        require(blockwise.why_not, VECTOR, SQUARE)
        gemms = self.gemms()
        document = tune(gemms, self.rounds, self.jobs, self.json)
        if len(document["products"]) < len(gemms):
            sys.exit("not all products were timed: no table is written")
        path = self.out or tuning.file_of(document["gpu"])
        tuning.FOLDER.mkdir(exist_ok=True)
        write_json(path, with_others(document, tuning.file_of(document["gpu"])))
        print(path)


def with_others(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """A table with what the file at ``path``, if there is one, has of pairs that were not measured now."""
    old = json.loads(path.read_text())["products"] if path.exists() else []
    new = document["products"]
    pairs = {(row["a"], row["b"], row.get("fast_accum")) for row in new}
    kept = [row for row in old if (row["a"], row["b"], row.get("fast_accum")) not in pairs]
    return {**document, "products": [*kept, *new]}


@dataclass(frozen=True)
class Grouped:
    """Products by groups, of experts."""

    shapes: tuple[str, ...] = tuple(GROUPED_SHAPES)  # experts x out x in x tokens
    lies: tuple[Literal[tuple(LIES)], ...] = tuple(LIES)
    recipes: tuple[Literal[tuple(KINDS)], ...] = tuple(KINDS)
    rounds: int = 20
    jobs: int = JOBS  # processes that check
    json: str | None = None  # also write the figures here

    def run(self) -> None:
        """Tune."""
        spec = f8sub.get_recipe("rowwise").fprop
        require(grouped_gemm.why_not_triton, spec.a, spec.b)
        kinds = [(recipe, gemm) for recipe in self.recipes for gemm in KINDS[recipe]]
        places = list(itertools.product(self.shapes, self.lies))
        gemms = [
            GroupedGemm(recipe, problem_of(shape, gemm, lie))
            for recipe, gemm in kinds
            for shape, lie in places
        ]
        tune(gemms, self.rounds, self.jobs, self.json)


if __name__ == "__main__":
    tyro.cli(Dense | Grouped, default=Dense(), description=__doc__).run()
