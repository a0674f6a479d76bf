"""Every Triton quantizer, in GB/s of the bytes it has to move and in per cent of what a copy reaches.

Beside it the reference in eager code and compiled by Inductor. Before a quantizer is timed it is compared with the
reference, bitwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from f8sub import Float8Format, Operand
from f8sub.kernels import cuda, reference
from f8sub.kernels.scales import PriorScale
from scripts.bench import formats
from scripts.bench.formats import USAGES
from scripts.bench.gpu import shards
from scripts.bench.gpu.session import Session
from scripts.bench.timing import SETS, graph_pool, host_ms, in_turns, summary, wait, without_host
from scripts.table import Table

SHAPES = ["8192x4096", "8192x14336", "14336x4096", "8192x28672"]
"""x, dy and w of a Llama 8B's and 70B's MLP, over 8192 tokens."""

TINY = ["48x160"]

FORMATS = {name: format for name, format in formats.FORMATS.items() if name != "tensorwise e5m2"}
READ_TWICE = {("tensorwise", name) for name in USAGES} | {("rowwise", "both"), ("rowwise", "column")}
"""Those whose amax spans more than a program reads: the matrix is read once for it and once to be cast."""

DERIVED = {"128x128": 2.0, "rowwise": 3.0, "1x128": 2.0}
"""Formats whose gathered codes are brought to their columnwise usage, and the bytes an element that this moves."""

TABLES = ("tensorwise", "rowwise", "128x128")
"""Formats of the weights whose shards' amaxes and scales are made."""

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
    """Something to time.

    Attributes:
        expected: what ``run`` is to equal, bitwise; None where there is nothing to compare.
        bytes: an element that it has to move to and from memory.
        inputs: what the sets hold: ``"x"``, matrices, the name of a format, their rowwise codes in that, or that after
            ``"shards "``, weights of it that make them up.
    """

    name: str
    run: Callable[[Any], Any]
    expected: Callable[[Any], Any] | None
    bytes: float
    inputs: str = "x"


def benches(device: torch.device, compiled: bool) -> list[Bench]:
    """The copy first, then every quantizer, then what it is compared with."""
    found = [Bench("copy", torch.clone, None, 4.0)]
    modules = (cuda.quantize, reference.quantize)
    for name, format in FORMATS.items():
        for usage, (row, col) in USAGES.items():
            formats = format if row else None, format if col else None
            moved = (4.0 if (name, usage) in READ_TWICE else 2.0) + row + col
            ours, right = (quantizer_of(quantize, formats) for quantize in modules)
            found.append(Bench(f"{name} {usage}", ours, right, moved))
        both = quantizer_of(reference.quantize, (format, format))
        moved = (4.0 if (name, "both") in READ_TWICE else 2.0) + 2.0
        found.append(Bench(f"{name} both, reference eager", both, None, moved))
        if compiled:
            found.append(Bench(f"{name} both, reference compiled", torch.compile(both), None, moved))
    whole = FORMATS["tensorwise"]
    for name, known in (("scale of the past both", False), ("known scale of the past both", True)):
        past = PriorScale(torch.ones(1, 1, device=device), 0.0, covers=False, is_known=known)
        ours, right = (quantizer_of(quantize, (whole, whole), prior=past) for quantize in modules)
        found.append(Bench(name, ours, right, 4.0))
    for name, moved in DERIVED.items():
        format = FORMATS[name]
        ours, right = derivation_of(cuda, format), derivation_of(reference, format)
        found.append(Bench(f"columns of {name} codes", ours, right, moved, name))
        if compiled:
            right = torch.compile(right)
            found.append(Bench(f"columns of {name} codes, reference compiled", right, None, moved, name))
    for name in TABLES:
        given = f"shards {name}"
        found.append(Bench(f"amaxes and scales of {given}", shards.by_launches, copied_table, 4.0, given))
        found.append(Bench(f"amaxes and scales of {given}, torch", shards.by_operators, None, 4.0, given))
    return found


def copied_table(given: shards.Shards) -> tuple[Operand]:
    """What torch's operators make, apart from where kernels write to."""
    (made,) = shards.by_operators(given)
    return (made._replace(data=made.data.clone(), scale_inv=made.scale_inv.clone()),)


def derivation_of(module: Any, format: Float8Format) -> Callable[[Operand], Any]:
    return lambda codes: (module.derive_columnwise(codes, format),)


def quantizer_of(quantize: Callable, formats: tuple, **options: Any) -> Callable[[torch.Tensor], Any]:
    return lambda x: quantize(x, *formats, **options)[:2]


def check(bench: Bench, given: Any) -> None:
    """An error where a bench's result is not what is expected: nothing of it would be worth timing."""
    if bench.expected is None:
        return
    expected = bench.expected(given)
    for found, right in zip(bench.run(given), expected, strict=True):
        if (found is None) != (right is None):
            raise RuntimeError(f"{bench.name} made another usage than the reference")
        if found is not None and right is not None and not same(found, right):
            raise RuntimeError(f"{bench.name} of {tuple(right.data.shape)} differs from the reference")


def same(a: Operand, b: Operand) -> bool:
    codes = torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
    return codes and torch.equal(a.scale_inv, b.scale_inv)


def measure(shape: tuple[int, ...], session: Session) -> dict[str, dict]:
    """Bench -> median and spread in ms, GB/s, share of the copy's, and microseconds of the host."""
    device = session.device
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    sets = [torch.randn(shape, device=device).bfloat16() for _ in range(SETS)]
    given = {name: [cuda.quantize(x, FORMATS[name], None)[0] for x in sets] for name in DERIVED}
    given["x"] = sets
    given.update({f"shards {name}": [shards.Shards(x, FORMATS[name]) for x in sets] for name in TABLES})
    chosen = benches(device, compiled=on_gpu)
    timers = {}
    pool = graph_pool(device)
    for bench in chosen:
        inputs = given[bench.inputs]
        check(bench, inputs[0])
        timers[bench.name] = without_host(bench.run, inputs, device, pool)
    times = in_turns(timers, session.rounds)
    size = shape[0] * shape[1]
    results = {}
    for bench in chosen:
        row = summary(times[bench.name])
        results[bench.name] = {
            **row,
            "bytes_an_element": bench.bytes,
            "gb_per_s": bench.bytes * size / row["median_ms"] / 1e6,
            "host_us": host_ms(bench.run, given[bench.inputs][0], device) * 1e3,
        }
    wait(device)
    for row in results.values():
        row["of_copy"] = row["gb_per_s"] / results["copy"]["gb_per_s"]
    return results


def group(session: Session) -> None:
    figures = session.figures["quantize"] = {}
    for shape in session.sizes(SHAPES, TINY):
        text = "x".join(map(str, shape))
        with session.attempt(f"quantize {text}"):
            if session.device.type == "cuda":
                torch._dynamo.reset()
            figures[text] = measure(shape, session)
    for text, results in figures.items():
        title = f"quantize {text} bfloat16, {session.where}"
        session.tables.append(Table.of(title, results.items(), COLUMNS))
