"""Casts of tokens by group, and of the weights of experts, in GB/s of what they have to move, and of a copy's.

Before a cast is timed it is compared with the specification, bitwise. Groups are balanced, or as Zipf's law has them:
the i-th expert gets tokens in proportion to 1 / i.

"SwiGLU" is that of gate and up in one matrix, compiled, and a cast of its result; "in the cast" one kernel does both.
Their gradients are cast with the formats of dy. Each exponential is rounded as its kernel has it, so that a code may be
its neighbour.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from f8sub import Float8Format
from f8sub.kernels.gemm.select import GROUPED
from f8sub.kernels.grouped import operands
from f8sub.kernels.grouped.operands import BOTH, ExpertWeights, Gated, Groups
from f8sub.kernels.quantize import derive_columnwise_of_experts, quantize, quantize_computed, quantize_experts
from scripts.bench import formats
from scripts.bench.gpu.session import Session
from scripts.bench.timing import SETS, graph_pool, host_ms, in_turns, summary, wait, without_host
from scripts.table import Table

SHAPES = [
    "16384x5120x16",
    "131072x5120x16",
    "32768x7168x8",
    "32768x7168x32",
    "32768x2048x32",
    "32768x2048x128",
    "131072x2048x128",
    "131072x768x128",
]
"""Tokens x K x experts of Llama 4 Scout, DeepSeek-V3 on 32 and 8 ranks of expert parallelism, and Qwen3-30B-A3B."""

TINY = ["96x160x3"]

WEIGHTS = [(16, 8192, 5120), (32, 2048, 7168), (128, 1536, 2048), (128, 2048, 768), (32, 2880, 2880)]
TINY_WEIGHTS = [(3, 48, 160)]
"""Experts x N x K of the same, and of gpt-oss, whose rows 128 does not divide."""

GATED = {"tensorwise": "tensorwise e5m2", "rowwise": "rowwise", "1x128": "1x128"}
"""Formats of SwiGLU's result, and of its gradients."""

SAME_CODES = 0.999
"""The least share of codes that are the same where SwiGLU is computed in the cast."""

OF_WEIGHTS = ("tensorwise", "rowwise", "128x128", "256x256")
FORMATS = ("tensorwise", "rowwise", "1x128", "256x256")
MULTIPLE = GROUPED["triton"].multiple

COLUMNS = (
    ("bytes/element", "{bytes_an_element:.0f}"),
    ("ms", "{median_ms:.4f}"),
    ("spread", "{spread_ms:.4f}"),
    ("GB/s", "{gb_per_s:.0f}"),
    ("of copy", "{of_copy:.0%}"),
    ("host us", "{host_us:.0f}"),
)


@dataclass(frozen=True)
class Bench:
    """Something to time; ``bytes`` an element that memory has to move: one read of x, and the codes."""

    name: str
    run: Callable[[Any], Any]
    bytes: float


def counts_of(kind: str, tokens: int, count: int) -> list[int]:
    shares = [1.0 if kind == "balanced" else 1.0 / (i + 1) for i in range(count)]
    ends = [round(tokens * sum(shares[: i + 1]) / sum(shares)) for i in range(count)]
    return [end - first for first, end in zip([0, *ends], ends, strict=False)]


def copy(x: torch.Tensor) -> list[torch.Tensor]:
    """Of halves: where CUDA copies 512 MiB at a time, a byte takes half as long again."""
    return [half.clone() for half in x.chunk(2)]


def benches(groups: Groups) -> list[Bench]:
    found = [Bench("copy", copy, 4.0)]
    for name in FORMATS:
        format = formats.FORMATS[name]
        found.append(Bench(f"{name} both", cast_of(groups, format, format), 4.0))
        if name == "tensorwise":
            found.append(Bench(f"{name} row", cast_of(groups, format, None), 3.0))
        if name in ("tensorwise", "rowwise"):
            found.append(Bench(f"{name} column", cast_of(groups, None, format), 3.0))
    found.append(Bench("rowwise both, torch operators", by_operators(groups), 4.0))
    return found


def with_torchao(groups: Groups, x: torch.Tensor) -> list[Bench]:
    """Its casts, on a GPU where they run; what they raise is printed, and ours are timed without them."""
    peer = by_torchao(groups) if groups.ends.is_cuda else None
    if peer is None:
        return []
    try:
        peer(x)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"torchao's casts are left out: {type(error).__name__}: {error}", file=sys.stderr)
        return []
    return [Bench("rowwise both, torchao", peer, 4.0)]


def cast_of(groups: Groups, row: Float8Format | None, col: Float8Format | None) -> Callable:
    return lambda x: quantize(x, row, col, groups=groups, multiple=MULTIPLE)


def by_operators(groups: Groups) -> Callable:
    format = formats.FORMATS["rowwise"]
    return lambda x: [
        operands.quantize_tokens(x, groups, format, contracted=contracted, multiple=MULTIPLE)
        for contracted in (False, True)
    ]


def by_torchao(groups: Groups) -> Callable | None:
    """Both casts of its rowwise recipe, where it is installed and has its kernels."""
    try:
        kernels = importlib.import_module("torchao.prototype.moe_training.kernels")
        rowwise, columnwise = (
            getattr(kernels, f"triton_fp8_{name}")
            for name in ("rowwise_2d_scale_and_cast", "per_group_colwise_scales")
        )
    except (ImportError, AttributeError):
        return None
    e4m3 = torch.float8_e4m3fn
    return lambda x: (rowwise(x, e4m3, True), columnwise(x, groups.ends, e4m3, True))


def check(name: str, x: torch.Tensor, groups: Groups) -> None:
    """An error where codes differ from the specification's."""
    format = formats.FORMATS[name]
    made = quantize(x, format, format, groups=groups, multiple=MULTIPLE)
    for codes, contracted in zip(made[:2], (False, True), strict=True):
        right = operands.quantize_tokens(
            x, groups, format, contracted=contracted, multiple=MULTIPLE if contracted else 1
        )
        same_codes = torch.equal(codes.data.view(torch.uint8), right.data.contiguous().view(torch.uint8))
        if not (same_codes and torch.equal(codes.scale_inv, right.scale_inv)):
            raise RuntimeError(f"{name} of {tuple(x.shape)}, contracted {contracted}: not what is specified")


def measure(shape: tuple[int, ...], kind: str, session: Session) -> dict[str, dict]:
    """Casts of tokens, see ``timed``."""
    tokens, depth, count = shape
    device = session.device
    torch.manual_seed(0)
    counts = torch.tensor(counts_of(kind, tokens, count), device=device)
    groups = Groups.of(counts.cumsum(0).to(torch.int32), tokens)
    sets = [torch.randn((tokens, depth), device=device).bfloat16() for _ in range(SETS)]
    if tokens * depth <= 2**28:
        for name in FORMATS:
            check(name, sets[0], groups)
    chosen = benches(groups) + with_torchao(groups, sets[0])
    return timed([(bench, sets) for bench in chosen], session)


def swiglu(gate_up: torch.Tensor, dh: torch.Tensor) -> torch.Tensor:
    """Return SwiGLU's result."""
    return Gated(*gate_up.chunk(2, 1)).values()


def gradients(gate_up: torch.Tensor, dh: torch.Tensor) -> torch.Tensor:
    """Return the gradients of gate and up, side by side."""
    return Gated(*gate_up.chunk(2, 1), dh, BOTH).values()


def of_swiglu(shape: tuple[int, ...], kind: str, session: Session) -> dict[str, dict]:
    """SwiGLU and its gradients, tokens x N, with casts of them, see ``timed``; bytes are by elements of its result."""
    tokens, width, count = shape
    device = session.device
    torch.manual_seed(0)
    counts = torch.tensor(counts_of(kind, tokens, count), device=device)
    groups = Groups.of(counts.cumsum(0).to(torch.int32), tokens)
    sets = [
        tuple(torch.randn((tokens, n), device=device).bfloat16() for n in (2 * width, width))
        for _ in range(SETS)
    ]
    chosen: list[tuple[Bench, list[Any]]] = [(Bench("copy", copy, 4.0), [dh for _, dh in sets])]
    for name, of_gradients in GATED.items():
        for what, made, format, size in (
            ("SwiGLU", swiglu, formats.FORMATS[name], 6.0),
            ("gradients", gradients, formats.FORMATS[of_gradients], 10.0),
        ):
            compiled = torch.compile(made, dynamic=False) if device.type == "cuda" else made

            def apart(given: Any, compiled: Any = compiled, format: Float8Format = format) -> Any:
                return quantize(compiled(*given), format, format, groups=groups, multiple=MULTIPLE)

            def in_the_cast(given: Any, what: str = what, format: Float8Format = format) -> Any:
                gate, up = given[0].chunk(2, 1)
                gated = Gated(gate, up) if what == "SwiGLU" else Gated(gate, up, given[1], BOTH)
                return quantize_computed(gated, format, format, groups, MULTIPLE)

            # Eager, where each result is rounded.
            right = quantize(made(*sets[0]), format, format, groups=groups, multiple=MULTIPLE)
            pairs = zip(right[:2], in_the_cast(sets[0])[:2], strict=True)
            same = min(
                (a.data.view(torch.uint8) == b.data.view(torch.uint8)).float().mean() for a, b in pairs
            )
            if same < SAME_CODES:
                raise RuntimeError(
                    f"{name} of {what} of {shape}: {same:.2%} of the codes are what is specified"
                )
            chosen += [
                (Bench(f"{what}, then {format.name}", apart, size), sets),
                (Bench(f"{what} in the cast, {format.name}", in_the_cast, size), sets),
            ]
    return timed(chosen, session)


def of_weights(shape: tuple[int, int, int], session: Session) -> dict[str, dict]:
    """Casts of weights and of their codes to columns, see ``timed``."""
    torch.manual_seed(0)
    sets = [torch.randn(shape, device=session.device).bfloat16() for _ in range(SETS)]
    chosen = [(Bench("copy", copy, 4.0), sets)]
    for name in OF_WEIGHTS:
        format = formats.FORMATS[name]

        def cast(w: torch.Tensor, format: Float8Format = format) -> ExpertWeights:
            return quantize_experts(w, format)

        def derive(codes: ExpertWeights, format: Float8Format = format) -> ExpertWeights:
            return derive_columnwise_of_experts(codes, format, codes.data)

        codes = [cast(w) for w in sets]
        rowwise = operands.quantize_weights(sets[0], format)
        for made, right in (
            (codes[0], rowwise),
            (derive(codes[0]), operands.derive_columnwise(rowwise, format)),
        ):
            if not torch.equal(made.data.float(), right.data.float()) or not torch.equal(
                made.scale_inv, right.scale_inv
            ):
                raise RuntimeError(f"{name} of {shape}: not what is specified")
        chosen += [
            (Bench(f"{name} rows", cast, 3.0), sets),
            (Bench(f"{name} columns of codes", derive, 2.0), codes),
        ]
    return timed(chosen, session)


def timed(chosen: list[tuple[Bench, list[Any]]], session: Session) -> dict[str, dict]:
    """Bench -> median and spread in ms, GB/s, share of the copy's, and microseconds of the host; the copy first."""
    device = session.device
    pool, size = graph_pool(device), chosen[0][1][0].numel()
    timers = {bench.name: without_host(bench.run, sets, device, pool) for bench, sets in chosen}
    times = in_turns(timers, session.rounds)
    results = {}
    for bench, sets in chosen:
        row = summary(times[bench.name])
        results[bench.name] = {
            **row,
            "bytes_an_element": bench.bytes,
            "gb_per_s": bench.bytes * size / row["median_ms"] / 1e6,
            "host_us": host_ms(bench.run, sets[0], device) * 1e3,
        }
    wait(device)
    for row in results.values():
        row["of_copy"] = row["gb_per_s"] / results["copy"]["gb_per_s"]
    return results


def group(session: Session) -> None:
    figures = session.figures["experts_casts"] = {}
    for shape in session.sizes(SHAPES, TINY):
        for kind in ("balanced", "zipf"):
            text = f"{'x'.join(map(str, shape))} {kind}"
            with session.attempt(f"experts_casts {text}"):
                figures[f"tokens {text}"] = measure(shape, kind, session)
            with session.attempt(f"experts_casts SwiGLU {text}"):
                figures[f"SwiGLU {text}"] = of_swiglu(shape, kind, session)
    for weights in () if session.shapes else (TINY_WEIGHTS if session.tiny else WEIGHTS):
        text = f"weights {'x'.join(map(str, weights))}"
        with session.attempt(f"experts_casts {text}"):
            figures[text] = of_weights(weights, session)
    for text, results in figures.items():
        title = f"casts of experts' {text} bfloat16, {session.where}"
        session.tables.append(Table.of(title, results.items(), COLUMNS))
