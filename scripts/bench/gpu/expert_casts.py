"""Casts of tokens by group and of the weights of experts, in GB/s of what they have to move, and of a copy's.

Before a cast is timed it is compared with the specification, bitwise. Groups are balanced, or as Zipf's law has them:
the i-th expert gets tokens in proportion to 1 / i.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from f8sub import Float8Format
from f8sub.kernels import groups as specification
from f8sub.kernels.groups import Groups
from f8sub.kernels.quantize import quantize_groups
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

FORMATS = ("tensorwise", "rowwise", "1x128", "256x256")
READ_TWICE = ("tensorwise", "rowwise")
MULTIPLE = 16

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
    """Something to time; ``bytes`` an element of the tokens, of which those of zeros between groups are none."""

    name: str
    run: Callable[[Any], Any]
    bytes: float


def counts_of(kind: str, tokens: int, experts: int) -> list[int]:
    shares = [1.0 if kind == "balanced" else 1.0 / (i + 1) for i in range(experts)]
    ends = [round(tokens * sum(shares[: i + 1]) / sum(shares)) for i in range(experts)]
    return [end - first for first, end in zip([0, *ends], ends, strict=False)]


def benches(groups: Groups) -> list[Bench]:
    found = [Bench("copy", torch.clone, 4.0)]
    for name in FORMATS:
        format, reads = formats.FORMATS[name], 4.0 if name in READ_TWICE else 2.0
        found.append(Bench(f"{name} both", cast_of(groups, format, format), reads + 2.0))
        if name == "tensorwise":
            found.append(Bench(f"{name} row", cast_of(groups, format, None), reads + 1.0))
        if name == "rowwise":
            found.append(Bench(f"{name} column", cast_of(groups, None, format), reads + 1.0))
    found.append(Bench("rowwise both, torch operators", by_operators(groups), 6.0))
    if groups.ends.is_cuda and (peer := by_torchao(groups)) is not None:
        found.append(Bench("rowwise both, torchao", peer, 8.0))
    return found


def cast_of(groups: Groups, row: Float8Format | None, col: Float8Format | None) -> Callable:
    return lambda x: quantize_groups(x, groups, row, col, MULTIPLE)


def by_operators(groups: Groups) -> Callable:
    format = formats.FORMATS["rowwise"]
    return lambda x: [
        specification.quantize(x, groups, format, columnwise=columnwise, multiple=MULTIPLE)
        for columnwise in (False, True)
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
    made = quantize_groups(x, groups, format, format, MULTIPLE)
    for codes, columnwise in zip(made, (False, True), strict=True):
        right = specification.quantize(
            x, groups, format, columnwise=columnwise, multiple=MULTIPLE if columnwise else 1
        )
        same_codes = torch.equal(codes.data.view(torch.uint8), right.data.contiguous().view(torch.uint8))
        if not (same_codes and torch.equal(codes.scale_inv, right.scale_inv)):
            raise RuntimeError(f"{name} of {tuple(x.shape)}, columnwise {columnwise}: not what is specified")


def measure(shape: tuple[int, ...], kind: str, session: Session) -> dict[str, dict]:
    """Bench -> median and spread in ms, GB/s, share of the copy's, and microseconds of the host."""
    tokens, depth, experts = shape
    device = session.device
    torch.manual_seed(0)
    counts = torch.tensor(counts_of(kind, tokens, experts), device=device)
    groups = Groups.of(counts.cumsum(0).to(torch.int32), tokens)
    sets = [torch.randn((tokens, depth), device=device).bfloat16() for _ in range(SETS)]
    if tokens * depth <= 2**28:
        for name in FORMATS:
            check(name, sets[0], groups)
    chosen, pool = benches(groups), graph_pool(device)
    timers = {bench.name: without_host(bench.run, sets, device, pool) for bench in chosen}
    times = in_turns(timers, session.rounds)
    results = {}
    for bench in chosen:
        row = summary(times[bench.name])
        results[bench.name] = {
            **row,
            "bytes_an_element": bench.bytes,
            "gb_per_s": bench.bytes * tokens * depth / row["median_ms"] / 1e6,
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
                figures[text] = measure(shape, kind, session)
    for text, results in figures.items():
        title = f"casts of experts' tokens {text} bfloat16, {session.where}"
        session.tables.append(Table.of(title, results.items(), COLUMNS))
