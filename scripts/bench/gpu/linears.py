"""One linear layer, forward and backward, at the shapes of Llama models: every variant, in one run.

Two times a call. Launched: as Python launches it, which is what a training loop sees. As a graph: the GPU's own, the
host left out; f8sub's eager layer casts its weight once more there, because nothing is kept while a graph is recorded.
The weight counts as changed before every call. y, dx and dw are compared with bf16's in float32 before all that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from scripts.bench.gpu.session import Session
from scripts.bench.gpu.variants import BF16, Variant, allow_recompiles, chosen
from scripts.bench.timing import (
    SETS,
    by_graph,
    by_launches,
    graph_pool,
    host_ms,
    in_turns,
    kernels,
    peak_bytes,
    sqnr,
    summary,
)
from scripts.table import Table

SHAPES = ["8192x4096x14336", "8192x4096x4096"]
"""Tokens, features in and out. Others: a Llama 8B's 8192x4096x6144 and 8192x14336x4096; a 70B's 8192x8192x10240,
8192x8192x8192, 8192x8192x28672 and 8192x28672x8192; with its tensors cut in 8, 8192x8192x1280, 8192x1024x8192,
8192x8192x3584 and 8192x3584x8192."""

TINY = ["32x128x160"]
HOST_CALLS = 5

Given = tuple[torch.Tensor, torch.Tensor]
"""x and dy."""


COLUMNS = (
    ("launched ms", "{launched[median_ms]:.3f}"),
    ("spread", "{launched[spread_ms]:.3f}"),
    ("over bf16", "{launched[over_bf16]:.2f}x"),
    ("graph ms", "{graph[median_ms]:.3f}"),
    ("spread", "{graph[spread_ms]:.3f}"),
    ("over bf16", "{graph[over_bf16]:.2f}x"),
    ("host us", "{host_us:.0f}"),
    ("kernels", "{launches:d}"),
    ("peak MB", "{peak_bytes/1e6:.0f}"),
    ("y / dx / dw dB", "{sqnr_db[y]:.1f} / {sqnr_db[dx]:.1f} / {sqnr_db[dw]:.1f}"),
)


class Layer:
    """A variant's layer; its weight is the same for every variant."""

    def __init__(self, variant: Variant, fan_in: int, fan_out: int, device: torch.device) -> None:
        self.variant = variant
        self._model = variant.convert(nn.Sequential(plain(fan_in, fan_out, device)), sharded=False)
        self._weight = self._model[0].weight
        self._called = variant.compile(self._model[0], device)

    def step(self, given: Given) -> tuple[torch.Tensor, ...]:
        """Forward and backward: y, dx and dw."""
        x, dy = given
        y = self._called(x)
        return y, *torch.autograd.grad(y, (x, self._weight), dy)

    def changed(self) -> None:
        """Have the weight count as changed."""
        self.variant.mark_changed(self._model)

    def stepped(self) -> None:
        """What an optimizer's step is followed by; histories of amaxes roll."""
        self.variant.precompute(self._model)


def plain(fan_in: int, fan_out: int, device: torch.device) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(fan_in, fan_out, bias=False, dtype=torch.bfloat16, device=device)


def right_of(given: Given, fan_out: int) -> tuple[torch.Tensor, ...]:
    """y, dx and dw in float32."""
    w = plain(given[0].shape[1], fan_out, given[0].device).weight
    x, dy, w = (tensor.detach().float() for tensor in (*given, w))
    return x @ w.t(), dy @ w, dy.t() @ x


def check(layer: Layer, given: Given, right: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """SQNR of y, dx and dw, in dB; an error where one is below the variant's floor."""
    pairs = zip(("y", "dx", "dw"), layer.step(given), right, strict=True)
    found = {name: sqnr(tensor.detach(), exact) for name, tensor, exact in pairs}
    if not min(found.values()) >= layer.variant.floor_db:
        raise RuntimeError(f"{layer.variant.name}: {found} dB, at least {layer.variant.floor_db}")
    return found


def inspect(
    layer: Layer, sets: list[Given], right: tuple[torch.Tensor, ...], device: torch.device
) -> dict[str, Any]:
    """What is looked at once: SQNR, memory, kernels, the host's time."""
    for _ in range(layer.variant.passes_before_scales):
        layer.step(sets[0])
    row: dict[str, Any] = {"sqnr_db": check(layer, sets[0], right)}
    layer.stepped()
    for given in sets:
        layer.changed()
        layer.step(given)
    layer.changed()
    row["peak_bytes"] = peak_bytes(layer.step, sets[0], device)
    layer.changed()
    row |= kernels(layer.step, sets[0], device)
    times = []
    for _ in range(HOST_CALLS):
        layer.changed()
        times.append(host_ms(layer.step, sets[0], device))
    row["host_us"] = summary(times)["median_ms"] * 1e3
    return row


def measure(shape: tuple[int, ...], variants: list[Variant], session: Session) -> dict[str, dict]:
    """Variant -> its figures."""
    tokens, fan_in, fan_out = shape
    device = session.device
    torch.manual_seed(1)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    sets = [
        (torch.randn(tokens, fan_in, **options).requires_grad_(), torch.randn(tokens, fan_out, **options))
        for _ in range(SETS)
    ]
    right = right_of(sets[0], fan_out)
    pool = graph_pool(device)
    rows: dict[str, dict] = {}
    timers: dict[tuple[str, str], Callable[[], float]] = {}
    for variant in variants:
        with session.attempt(f"linear {shape} {variant.name}"):
            layer = Layer(variant, fan_in, fan_out, device)
            row = inspect(layer, sets, right, device)
            timers[variant.name, "launched"] = by_launches(layer.step, sets, device, layer.changed)
            rows[variant.name] = row
            if device.type == "cuda":
                try:
                    timers[variant.name, "graph"] = by_graph(layer.step, sets, pool)
                except RuntimeError as error:
                    row["no_graph"] = str(error)
    del right
    for (name, how), times in in_turns(timers, session.rounds).items():
        rows[name][how] = summary(times)
    compare(rows)
    return rows


def compare(rows: dict[str, dict]) -> None:
    """How many times as fast as the faster of the bf16 ones, each way of timing by itself."""
    for how in ("launched", "graph"):
        bf16 = [row[how]["median_ms"] for name, row in rows.items() if name.startswith(BF16) and how in row]
        for row in rows.values():
            if how in row and bf16:
                row[how]["over_bf16"] = min(bf16) / row[how]["median_ms"]


def group(session: Session) -> None:
    allow_recompiles()
    variants, skipped = chosen(session.only, session.device, of_layers=True)
    figures = session.figures["linear"] = {"skipped": skipped, "layers": {}}
    for shape in session.sizes(SHAPES, TINY):
        text = "x".join(map(str, shape))
        with session.attempt(f"linear {text}"):
            torch._dynamo.reset()
            figures["layers"][text] = measure(shape, variants, session)
    for text, rows in figures["layers"].items():
        title = f"linear {text}, forward and backward, {session.where}"
        session.tables.append(Table.of(title, rows.items(), COLUMNS))
    if skipped:
        session.tables.append(Table("linear, not run", ("", "reason"), list(skipped.items())))
