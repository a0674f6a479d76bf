"""Experts of mixtures: each grouped GEMM in TFLOP/s, and a step of gate, up, SwiGLU and down, forward and backward.

Tokens lie in groups of equal size, or as a Zipf law has it, by which the first of 128 experts gets 18 % of them; all
sizes are multiples of 16, which torchao's take. Products are compared with those of the same codes in float32 before
they are timed, and a step with bf16's. A step casts tokens and weights anew, as after an optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import f8sub
from f8sub import GemmSpec
from f8sub.formats import present
from f8sub.kernels import reference
from f8sub.kernels.gemm.select import GROUPED
from f8sub.kernels.grouped.operands import ExpertWeights, Groups, Tokens
from f8sub.kernels.quantize import quantize, quantize_experts
from scripts.bench.gpu import expert_steps
from scripts.bench.gpu.expert_steps import LIES, Lie
from scripts.bench.gpu.session import Session
from scripts.bench.timing import graph_pool, in_turns, sqnr, summary, without_host
from scripts.table import Table

SHAPES = ["16x8192x5120x16384", "8x2048x7168x32768", "128x768x2048x131072"]
"""Experts, features out and in, tokens: Llama 4 Scout, DeepSeek-V3 with 8 experts a GPU, Qwen3-30B-A3B."""

TINY = ["4x64x128x96"]
RECIPES = ("rowwise", "tensorwise", "blockwise")
SETS = 2
FLOOR_DB, FAST_FLOOR_DB = 40.0, 25.0
"""See ``gemms.FLOOR_DB``."""

COLUMNS = (
    ("ms", "{median_ms:.4f}"),
    ("spread", "{spread_ms:.4f}"),
    ("TFLOP/s", "{tflops:.0f}"),
    ("over bf16", "{over_bf16:.2f}x"),
    ("dB", "{sqnr_db:.1f}"),
)


@dataclass(frozen=True)
class Problem:
    """One of the three GEMMs of a layer of experts."""

    gemm: str
    shape: tuple[int, int, int, int]
    lie: Lie

    @property
    def name(self) -> str:
        """What it is, in words."""
        return f"{self.gemm} of {'x'.join(map(str, self.shape))}, {self.lie.name}"

    @property
    def tflop(self) -> float:
        """10**12 floating-point operations, a multiplication and an addition counted as two."""
        _, n, k, tokens = self.shape
        return 2 * n * k * tokens / 1e12

    def given(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """In bf16: tokens and the weights they are multiplied with, or both matrices of tokens."""
        experts, n, k, tokens = self.shape
        random = {"device": device, "dtype": torch.bfloat16}
        if self.gemm == "wgrad":
            return torch.randn(tokens, n, **random), torch.randn(tokens, k, **random)
        out, depth = (n, k) if self.gemm == "fprop" else (k, n)
        return torch.randn(tokens, depth, **random), torch.randn(experts, out, depth, **random)


def in_bf16(problem: Problem, a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Torch's own product."""
    if problem.gemm == "wgrad":
        return torch._grouped_mm(a.t(), b, offs=groups.ends)
    return torch._grouped_mm(a, b.transpose(1, 2), offs=groups.ends)


class Product:
    """A product of codes by one backend."""

    def __init__(self, problem: Problem, spec: GemmSpec, backend: str, groups: Groups) -> None:
        self.problem, self.spec, self.backend, self.groups = problem, spec, backend, groups

    def operands(self, a: torch.Tensor, b: torch.Tensor) -> tuple[Tokens, Tokens | ExpertWeights]:
        """Codes as the backend wants them."""
        left, right = self.spec.a, self.spec.b
        assert left is not None
        assert right is not None
        if self.problem.gemm != "wgrad":
            return present(quantize(a, left, None, groups=self.groups).rowwise), quantize_experts(b, right)
        multiple = GROUPED[self.backend].multiple
        x, y = (
            present(quantize(matrix, None, format, groups=self.groups, multiple=multiple).columnwise)
            for matrix, format in ((a, left), (b, right))
        )
        return tuple(t._replace(data=t.data.contiguous()) for t in (x, y))  # type: ignore[return-value]

    def __call__(self, operands: tuple[Any, Any]) -> torch.Tensor:
        """The product, in bf16."""
        if self.problem.gemm == "wgrad":
            multiply: Callable[..., torch.Tensor] = GROUPED[self.backend].weights
        else:
            multiply = GROUPED[self.backend].rows
        return multiply(*operands, self.groups, torch.bfloat16, self.spec.fast_accum)

    def sqnr(self, operands: tuple[Any, Any]) -> float:
        """In dB, against the product of the codes in float32: of the largest group, and of the smallest with rows."""
        found, (a, b) = self(operands), operands
        counts = self.problem.lie.counts
        largest, smallest = counts.index(max(counts)), counts.index(min(filter(None, counts)))
        worst = float("inf")
        for group in {largest, smallest}:
            first = sum(counts[:group])
            rows = slice(first, first + counts[group])
            own = a.groups.host_bounds[group]
            left = reference.dequantize(a.of_group(group, *own), torch.float32)
            if isinstance(b, Tokens):
                right, got = b.of_group(group, *b.groups.host_bounds[group]), found[group]
            else:
                right, got = b.of_group(group), found[rows]
            exact = left @ reference.dequantize(right, torch.float32).t()
            worst = min(worst, sqnr(got, exact))
        floor = FAST_FLOOR_DB if self.spec.fast_accum else FLOOR_DB
        if not worst >= floor:
            raise RuntimeError(f"{self.backend}: {worst:.1f} dB of its operands' product, at least {floor}")
        return worst


def products(
    problem: Problem, groups: Groups, device: torch.device, skipped: dict[str, str]
) -> Iterator[tuple[str, Product]]:
    """Those of every recipe by every backend that multiplies float8, and on a CPU by the one that reads codes."""
    left_out = ("dequantize", "reference") if device.type == "cuda" else ("reference",)
    for recipe in RECIPES:
        spec = getattr(f8sub.get_recipe(recipe), problem.gemm)
        for backend, found in GROUPED.items():
            if backend in left_out:
                continue
            if (reason := found.why_not(spec.a, spec.b, device)) is None:
                yield f"{recipe}, {backend}", Product(problem, spec, backend, groups)
            else:
                skipped[f"{problem.gemm} {recipe}, {backend}"] = reason


def measure(problem: Problem, session: Session, skipped: dict[str, str]) -> dict[str, dict]:
    """Name -> median and spread in ms, TFLOP/s, how many times bf16's, dB."""
    device = session.device
    torch.manual_seed(0)
    groups = problem.lie.groups(device)
    sets = [problem.given(device) for _ in range(SETS)]
    pool = graph_pool(device)
    timers: dict[str, Callable[[], float]] = {}
    results: dict[str, dict] = {}
    with session.attempt(f"experts {problem.name} bf16"):
        timers["bf16"] = without_host(lambda pair: in_bf16(problem, *pair, groups), sets, device, pool)
        results["bf16"] = {}
    for name, product in products(problem, groups, device, skipped):
        with session.attempt(f"experts {problem.name} {name}"):
            operands = [product.operands(*given) for given in sets]
            reached = product.sqnr(operands[0])
            timers[name] = without_host(product, operands, device, pool)
            results[name] = {"sqnr_db": reached}
    for name, times in in_turns(timers, session.rounds).items():
        row = summary(times)
        results[name] |= {**row, "tflops": problem.tflop / row["median_ms"] * 1e3}
    for row in results.values():
        row["over_bf16"] = row["tflops"] / results["bf16"]["tflops"]
    return results


def group(session: Session) -> None:
    figures: dict[str, Any] = {"skipped": {}, "products": {}, "steps": {}}
    session.figures["experts"] = figures
    for shape in session.sizes(SHAPES, TINY):
        experts, n, k, tokens = shape
        for kind in LIES:
            lie = Lie.of(kind, experts, tokens)
            for gemm in ("fprop", "dgrad", "wgrad"):
                problem = Problem(gemm, (experts, n, k, tokens), lie)
                with session.attempt(f"experts {problem.name}"):
                    figures["products"][problem.name] = measure(problem, session, figures["skipped"])
            step = f"step of {'x'.join(map(str, shape))}, {kind}"
            with session.attempt(f"experts {step}"):
                figures["steps"][step] = expert_steps.measure(
                    (experts, n, k, tokens), lie, session, figures["skipped"]
                )
    for name, results in figures["products"].items():
        session.tables.append(Table.of(f"experts {name}, {session.where}", results.items(), COLUMNS))
    for name, results in figures["steps"].items():
        title = f"experts {name}: gate, up, SwiGLU, down, forward and backward, {session.where}"
        session.tables.append(Table.of(title, results.items(), expert_steps.COLUMNS))
    if figures["skipped"]:
        session.tables.append(Table("experts, not run", ("", "reason"), list(figures["skipped"].items())))
