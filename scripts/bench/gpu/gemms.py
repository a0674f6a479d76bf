"""Every float8 GEMM that a backend has, in TFLOP/s, beside a bf16 matmul: the ceiling.

The operands are codes of random matrices; a product is compared with that of the same codes in float64 before it is
timed. Listed are the backends of ``f8sub.kernels.gemm.select.GEMM`` but the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from f8sub import Operand
from f8sub.kernels import reference
from f8sub.kernels.gemm import select
from f8sub.kernels.quantize import quantize
from scripts.bench.formats import FORMATS
from scripts.bench.gpu.session import Session
from scripts.bench.timing import SETS, graph_pool, in_turns, sqnr, summary, without_host
from scripts.table import Table

SHAPES = ["8192x4096x14336", "8192x8192x8192"]
"""Tokens, features in and out: a Llama 8B's largest layer, and the usual cube."""

TINY = ["64x256x384", "128x128x128"]

FLOOR_DB, FAST_FLOOR_DB = 40.0, 25.0
"""Rounding to bf16 leaves 56 dB. Fast accumulation truncates its sum by up to 2**-13 of itself every 32 elements of K,
some per cent where K is 14336. A wrong scale, or elements in wrong places, leave less than 6 dB."""

KINDS = {
    "tensorwise fast": (FORMATS["tensorwise"], FORMATS["tensorwise"], True),
    "tensorwise": (FORMATS["tensorwise"], FORMATS["tensorwise"], False),
    "tensorwise e5m2": (FORMATS["tensorwise e5m2"], FORMATS["tensorwise"], False),
    "rowwise fast": (FORMATS["rowwise"], FORMATS["rowwise"], True),
    "rowwise": (FORMATS["rowwise"], FORMATS["rowwise"], False),
    "1x128 * 128x128": (FORMATS["1x128"], FORMATS["128x128"], False),
    "1x128 * 1x128": (FORMATS["1x128"], FORMATS["1x128"], False),
    "256x256": (FORMATS["256x256"], FORMATS["256x256"], False),
    "256x256 e5m2": (FORMATS["256x256 e5m2"], FORMATS["256x256"], False),
}
"""Formats of a and b, and whether sums stay in the tensor cores' accumulators."""

COLUMNS = (
    ("ms", "{median_ms:.4f}"),
    ("spread", "{spread_ms:.4f}"),
    ("TFLOP/s", "{tflops:.0f}"),
    ("over bf16", "{over_bf16:.2f}x"),
    ("dB", "{sqnr_db:.1f}"),
)


@dataclass(frozen=True)
class Problem:
    """``out = a @ b.t()`` with a (m, k) and b (n, k)."""

    name: str
    m: int
    n: int
    k: int

    @property
    def tflop(self) -> float:
        """10**12 floating-point operations, a multiplication and an addition counted as two."""
        return 2 * self.m * self.n * self.k / 1e12


def problems(shape: tuple[int, ...]) -> list[Problem]:
    """The three GEMMs of a layer of (tokens, in, out); one where they are alike."""
    tokens, fan_in, fan_out = shape
    if tokens == fan_in == fan_out:
        return [Problem(f"{tokens}^3", tokens, tokens, tokens)]
    text = f"of ({tokens}, {fan_in}, {fan_out})"
    return [
        Problem(f"fprop {text}", tokens, fan_out, fan_in),
        Problem(f"dgrad {text}", tokens, fan_in, fan_out),
        Problem(f"wgrad {text}", fan_out, fan_in, tokens),
    ]


def check(name: str, found: torch.Tensor, a: Operand, b: Operand, floor: float) -> float:
    """SQNR in dB against the product of the codes in float64; an error where it is below ``floor``."""
    right = reference.dequantize(a, torch.float64) @ reference.dequantize(b, torch.float64).t()
    reached = sqnr(found, right)
    if not reached >= floor:
        raise RuntimeError(f"{name}: {reached:.1f} dB of its operands' product, at least {floor}")
    return reached


def runs_of(
    problem: Problem, session: Session, skipped: dict[str, str]
) -> dict[str, tuple[Any, list, float]]:
    """Name -> what to run, its sets, and what it was checked to reach in dB; bf16 first."""
    device = session.device
    torch.manual_seed(0)
    sets = [
        tuple(torch.randn(rows, problem.k, device=device).bfloat16() for rows in (problem.m, problem.n))
        for _ in range(SETS)
    ]
    found: dict[str, tuple[Any, list, float]] = {}
    x, w = sets[0]
    reached = sqnr(torch.mm(x, w.t()), x.double() @ w.double().t())
    found["bf16"] = (lambda pair: torch.mm(pair[0], pair[1].t()), sets, reached)
    for kind, (a_format, b_format, fast) in KINDS.items():
        operands: list = []
        for backend, module in select.GEMM.items():
            if module is select.GEMM["reference"]:
                continue
            name = f"{kind}, {backend}"
            if (reason := module.why_not(a_format, b_format, device)) is not None:
                skipped[name] = reason
                continue
            with session.attempt(f"gemm {problem.name} {name}"):
                if not operands:
                    operands = [
                        (quantize(a, a_format, None).rowwise, quantize(b, b_format, None).rowwise)
                        for a, b in sets
                    ]

                def run(pair: Any, backend: str = backend, fast: bool = fast) -> torch.Tensor:
                    return select.gemm_nt(backend, *pair, torch.bfloat16, fast)

                floor = FAST_FLOOR_DB if fast else FLOOR_DB
                found[name] = (run, operands, check(name, run(operands[0]), *operands[0], floor))
    return found


def measure(problem: Problem, session: Session, skipped: dict[str, str]) -> dict[str, dict]:
    """Name -> median and spread in ms, TFLOP/s, how many times bf16's, dB."""
    device = session.device
    runs = runs_of(problem, session, skipped)
    pool = graph_pool(device)
    timers = {}
    for name, (run, sets, _) in runs.items():
        with session.attempt(f"gemm {problem.name} {name}, timer"):
            timers[name] = without_host(run, sets, device, pool)
    results: dict[str, dict] = {}
    for name, times in in_turns(timers, session.rounds).items():
        row = summary(times)
        tflops = problem.tflop / row["median_ms"] * 1e3
        results[name] = {**row, "tflops": tflops, "sqnr_db": runs[name][2]}
    for row in results.values():
        row["over_bf16"] = row["tflops"] / results["bf16"]["tflops"]
    return results


def group(session: Session) -> None:
    figures = session.figures["gemm"] = {"skipped": {}, "products": {}}
    for shape in session.sizes(SHAPES, TINY):
        for problem in problems(shape):
            with session.attempt(f"gemm {problem.name}"):
                figures["products"][problem.name] = measure(problem, session, figures["skipped"])
    for name, results in figures["products"].items():
        session.tables.append(Table.of(f"gemm {name}, {session.where}", results.items(), COLUMNS))
    if figures["skipped"]:
        session.tables.append(Table("gemm, not run", ("", "reason"), list(figures["skipped"].items())))
