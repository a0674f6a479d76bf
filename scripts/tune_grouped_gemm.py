"""Times products by groups in the tiles that our kernels can make, and prints the best of each kind and shape.

Each candidate multiplies in a process of its own first, with a time limit, so that one that hangs costs only itself.
Right are those within 40 dB of the product of the codes in float32, 25 dB where sums stay in the tensor cores'
accumulators. Then all take turns in CUDA graphs, beside torch's own product where that takes the formats.

    python scripts/tune_grouped_gemm.py --json grouped.json
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

import f8sub
from f8sub.formats import ALL, Operand
from f8sub.kernels.gemm.select import GROUPED
from f8sub.kernels.gemm.tuning import GroupedConfig, Rows
from f8sub.kernels.grouped import gemm as grouped_gemm
from f8sub.kernels.grouped.operands import Groups
from scripts.bench.gpu.expert_steps import LIES, Lie
from scripts.bench.gpu.experts import SHAPES, Problem, Product
from scripts.bench.timing import by_graph, in_turns, machine, summary
from scripts.table import Table, parser, write_json

KINDS = {
    "rowwise": ("fprop", "dgrad", "wgrad"),
    "tensorwise": ("fprop", "dgrad", "wgrad"),
    "blockwise": ("fprop", "wgrad"),
    "gridquant": ("fprop",),
}
"""Recipes, and those of their GEMMs whose kernels or shapes differ."""

CHECKED = "4x384x640x1040"
"""Experts x out x in x tokens, of which tiles are ragged at every edge."""

SECONDS = 120
SETS = 2


def configs(spec: Any, over_rows: bool) -> list[GroupedConfig]:
    """Four to eight for a kind of product."""
    tile = spec.b.tile
    passes = (1,) if tile.rows == 1 and tile.cols != ALL else (1, 2) if over_rows else (1, 2, 4)
    persistent = [
        GroupedConfig(128, 256, 4, persistent=True, group=group, blocks=blocks)
        for blocks in passes
        for group in ((16,) if blocks != passes[-1] else (4, 8, 16))
    ]
    return [*persistent, GroupedConfig(128, 128, 4), GroupedConfig(64, 128, 5, warps=4)]


@dataclass(frozen=True)
class Candidate:
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


def check(candidate: Candidate) -> float:
    """SQNR in dB of a small product; an error below what a right one has."""
    device = torch.device("cuda")
    problem = problem_of(CHECKED, candidate.gemm, "zipf")
    torch.manual_seed(0)
    product = candidate.product(problem, problem.lie.groups(device))
    return product.sqnr(product.operands(*problem.given(device)))


def serve(connection: Connection, candidate: Candidate) -> None:
    try:
        connection.send(check(candidate))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {str(error)[:300]}")


def checked_alone(candidate: Candidate) -> float | str:
    """What ``check`` finds in a process of its own; a reason where that died or took too long."""
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    process = context.Process(target=serve, args=(other, candidate), daemon=True)
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


def candidates(recipe: str, gemm: str) -> list[Candidate]:
    """Of one GEMM of a recipe."""
    spec = getattr(f8sub.get_recipe(recipe), gemm)
    found: list[GroupedConfig | None] = [*configs(spec, gemm == "wgrad")]
    if GROUPED["scaled_grouped_mm"].why_not(spec.a, spec.b, torch.device("cuda")) is None:
        found.append(None)
    return [Candidate(recipe, gemm, config) for config in found]


def timed(problem: Problem, right: list[Candidate], rounds: int) -> dict[str, dict[str, float]]:
    """Candidate -> median and spread in milliseconds, and TFLOP/s."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    groups = problem.lie.groups(device)
    sets = [problem.given(device) for _ in range(SETS)]
    pool = torch.cuda.graph_pool_handle()
    made: dict[int, list] = {}
    timers: dict[str, Callable[[], float]] = {}
    for candidate in right:
        product = candidate.product(problem, groups)
        multiple = GROUPED[product.backend].multiple
        if multiple not in made:
            made[multiple] = [product.operands(*given) for given in sets]
        timers[candidate.name] = by_graph(product, made[multiple], pool)
    found = {}
    for name, times in in_turns(timers, rounds).items():
        row = summary(times)
        found[name] = {**row, "tflops": problem.tflop / row["median_ms"] * 1e3}
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+", default=SHAPES, help="experts x out x in x tokens")
    options.add_argument("--lies", nargs="+", default=list(LIES), choices=LIES)
    options.add_argument("--recipes", nargs="+", default=list(KINDS), choices=KINDS)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 12))
    arguments = options.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = f8sub.get_recipe("rowwise").fprop
    if reason := grouped_gemm.why_not_triton(spec.a, spec.b, device):
        sys.exit(f"the kernels to be measured: triton {reason}")
    gemms = [(recipe, gemm) for recipe in arguments.recipes for gemm in KINDS[recipe]]
    chosen = [candidate for kind in gemms for candidate in candidates(*kind)]
    before = machine(device)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = dict(zip(chosen, pool.map(checked_alone, chosen), strict=True))
    for candidate, result in results.items():
        if isinstance(result, str):
            print(
                f"not right, and not timed: {candidate.recipe} {candidate.gemm}, {candidate.name}: {result}"
            )
    rows, figures = [], []
    for recipe, gemm in gemms:
        alike = [
            c for c in chosen if (c.recipe, c.gemm) == (recipe, gemm) and not isinstance(results[c], str)
        ]
        for shape, lie in ((shape, lie) for shape in arguments.shapes for lie in arguments.lies):
            problem = problem_of(shape, gemm, lie)
            try:
                found = timed(problem, alike, arguments.rounds)
            except RuntimeError as error:
                print(f"FAILED {recipe} {problem.name}: {error}", file=sys.stderr)
                continue
            best = max(found, key=lambda name: found[name]["tflops"], default="")
            if not found:
                continue
            print(f"{recipe} {problem.name}: {best}, {found[best]['tflops']:.0f} TFLOP/s", flush=True)
            rows += [
                (f"{recipe} {problem.name}: {name}{' <' * (name == best)}", of) for name, of in found.items()
            ]
            tiles = {c.name: None if c.config is None else asdict(c.config) for c in alike}
            figures.append(
                {"recipe": recipe, "product": problem.name, "best": tiles.get(best), "variants": found}
            )
            if arguments.json:
                document = {"before": before, "after": machine(device), "products": figures}
                write_json(arguments.json, document)
    columns = (("ms", "{median_ms:.4f}"), ("spread", "{spread_ms:.4f}"), ("TFLOP/s", "{tflops:.0f}"))
    Table.of("products by groups, bf16 results", rows, columns).show()


if __name__ == "__main__":
    main()
