"""A step of a layer of experts: gate, up, SwiGLU and down, forward and backward, by everyone who has grouped products.

Every variant has the same weights, and casts them anew before each call, as after an optimizer's step. Steps are
timed as Python launches them, and as a CUDA graph, in which the host has no part.

A "gathered" variant is that of a rank of FSDP2: the weights of its step are the codes that FSDP2 gathered, once, before
it is timed. Their casts are of shards, each rank's own part, and not in the step.

In a "fused" one gate and up are one weight, as transformers and torchtitan's override ``fused_swiglu`` have them. It is
compared with bf16 fused.

f8sub's experts call ``grouped_swiglu``; those of "apart" call ``grouped_linear`` thrice, with SwiGLU between them.
"""

from __future__ import annotations

import fnmatch
import importlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import f8sub
from f8sub import Float8ConfigError
from f8sub.kernels.gemm.select import GROUPED, Plan
from f8sub.kernels.grouped.operands import Groups
from f8sub.weights.master_weight import MasterWeight
from scripts.bench.gpu.session import Session
from scripts.bench.ranks import process_group
from scripts.bench.timing import (
    by_graph,
    by_launches,
    graph_pool,
    in_turns,
    kernels,
    peak_bytes,
    sqnr,
    summary,
    wait,
)

LIES = ("balanced", "zipf")
RECIPES = ("rowwise", "tensorwise", "blockwise")
TORCHAO = "torchao.prototype.moe_training.fp8_grouped_mm"
SETS = 2
FLOOR_DB = 12.0
"""Of y, dx and dw against bf16's: three products of 20 to 28 dB each follow each other."""

COLUMNS = (
    ("ms", "{median_ms:.3f}"),
    ("spread", "{spread_ms:.3f}"),
    ("TFLOP/s", "{tflops:.0f}"),
    ("over bf16", "{over_bf16:.2f}x"),
    ("by rounds", "{over_bf16_quartiles[0]:.2f} to {over_bf16_quartiles[2]:.2f}"),
    ("graph ms", "{graphed[median_ms]:.3f}"),
    ("spread", "{graphed[spread_ms]:.3f}"),
    ("over bf16", "{graphed[over_bf16]:.2f}x"),
    ("by rounds", "{graphed[over_bf16_quartiles][0]:.2f} to {graphed[over_bf16_quartiles][2]:.2f}"),
    ("kernels", "{launches:d}"),
    ("peak MB", "{peak_bytes/1e6:.0f}"),
    ("y / dx / dw dB", "{sqnr_db[y]:.1f} / {sqnr_db[dx]:.1f} / {sqnr_db[dw]:.1f}"),
)


@dataclass(frozen=True)
class Lie:
    """How tokens lie in groups: a name, and how many each expert has."""

    name: str
    counts: list[int]

    @classmethod
    def of(cls, kind: str, experts: int, tokens: int) -> Lie:
        """Of equal size, or by a Zipf law in the order of the experts; multiples of 16."""
        share = torch.ones(experts) if kind == "balanced" else 1 / torch.arange(1, experts + 1).float()
        counts = (share / share.sum() * tokens / 16).int() * 16
        counts[0] += tokens - counts.sum()
        return cls(kind, counts.tolist())

    def groups(self, device: torch.device) -> Groups:
        """On a device."""
        ends = torch.tensor(self.counts, dtype=torch.int32, device=device).cumsum(0).int()
        return Groups.of(ends, sum(self.counts))


Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Experts(nn.Module):
    """Gate, up and down, (E, N, K), (E, N, K) and (E, K, N), over tokens that are sorted by expert.

    Where ``fused``, gate and up are one weight of (E, 2N, K). Without ``multiply`` all of it is ``grouped_swiglu``.
    """

    def __init__(
        self, shape: tuple[int, int, int], multiply: Multiply | None, device: torch.device, *, fused: bool
    ) -> None:
        super().__init__()
        experts, n, k = shape
        torch.manual_seed(2)
        random = {"device": device, "dtype": torch.bfloat16}
        gate, up = (torch.randn(experts, n, k, **random) / k**0.5 for _ in range(2))
        if fused:
            self.gate_up = nn.Parameter(torch.cat([gate, up], 1))
        else:
            self.gate, self.up = nn.Parameter(gate), nn.Parameter(up)
        self.down = nn.Parameter(torch.randn(experts, k, n, **random) / n**0.5)
        self.multiply, self.fused = multiply, fused

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:  # noqa: D102
        if self.multiply is None:
            weights = (self.gate_up, None) if self.fused else (self.gate, self.up)
            return f8sub.grouped_swiglu(x, *weights, self.down, ends)
        if self.fused:
            gate, up = self.multiply(x, self.gate_up, ends).chunk(2, -1)
        else:
            gate, up = self.multiply(x, self.gate, ends), self.multiply(x, self.up, ends)
        return self.multiply(nn.functional.silu(gate) * up, self.down, ends)


def in_bf16(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Torch's own grouped product."""
    return torch._grouped_mm(x, w.transpose(-2, -1), offs=ends)


def by_torchao(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The rowwise one of torchao."""
    multiply = importlib.import_module(TORCHAO)._to_fp8_rowwise_then_scaled_grouped_mm
    y: torch.Tensor = multiply(x, w.transpose(-2, -1), ends, pad_token_groups_for_grouped_mm=False)
    return y


@dataclass(frozen=True)
class Variant:
    """One way to run the step; ``recipe``, ``backend``, ``gathered`` and ``apart`` are f8sub's."""

    library: str
    compiled: bool = False
    recipe: str = ""
    backend: str = ""
    gathered: bool = False
    fused: bool = False
    apart: bool = False

    @property
    def name(self) -> str:
        """Of its row."""
        by = f"by {self.backend}" if self.backend not in ("", "auto") else ""
        how = "gathered" * self.gathered, "fused" * self.fused, "apart" * self.apart
        how += ("compiled" if self.compiled else "eager",)
        return " ".join(filter(None, (self.library, self.recipe, by, *how)))

    def why_not(self, device: torch.device) -> str | None:
        """Why it cannot be measured; None where it can."""
        try:
            if self.library == "torchao":
                importlib.import_module(TORCHAO)
                return None if device.type == "cuda" else "its kernels run on cuda"
            if self.library == "f8sub":
                Plan.make(f8sub.get_recipe(self.recipe), device, self.backend, grouped=True)
        except (ImportError, Float8ConfigError) as error:
            return str(error)
        return None

    def made(self, shape: tuple[int, int, int], device: torch.device) -> Experts:
        """The experts, converted where f8sub multiplies."""
        apart = f8sub.grouped_linear if self.apart else None
        multiply = {"bf16": in_bf16, "torchao": by_torchao, "f8sub": apart}[self.library]
        model = nn.Sequential(Experts(shape, multiply, device, fused=self.fused))
        if self.library == "f8sub":
            f8sub.register_experts(Experts)
            f8sub.convert_to_float8(
                model, self.recipe, experts=True, skip_defaults=False, backend=self.backend
            )
        if self.gathered:
            with process_group(
                device
            ):  # gone before anything is captured: NCCL has a thread that asks for events
                fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
                f8sub.precompute_scales(model)
                model.unshard()
                wait(device)
        found: Any = model[0]
        return found


def variants() -> list[Variant]:
    """bf16 first; f8sub by every backend of its own, and as ``auto`` mixes them."""
    by = ["auto", *(name for name in GROUPED if name not in ("reference", "dequantize"))]
    return [
        *(Variant("bf16", compiled, fused=fused) for compiled in (False, True) for fused in (False, True)),
        *(Variant("f8sub", False, recipe, backend) for recipe in RECIPES for backend in by),
        *(Variant("f8sub", True, recipe, "auto") for recipe in RECIPES),
        *(
            Variant("f8sub", compiled, recipe, "auto", True)
            for recipe in RECIPES
            for compiled in (False, True)
        ),
        *(
            Variant("f8sub", True, recipe, "auto", gathered, True)
            for recipe in RECIPES
            for gathered in (False, True)
        ),
        *(
            Variant("f8sub", True, recipe, "auto", True, fused, apart=True)
            for recipe in RECIPES
            for fused in (False, True)
        ),
        *(
            Variant("torchao", compiled, "rowwise", fused=fused)
            for compiled in (False, True)
            for fused in (False, True)
        ),
    ]


def chosen(only: Sequence[str]) -> list[Variant]:
    """Those whose names patterns match, all without any; and bf16, fused where another one is."""
    asked = [
        variant
        for variant in variants()
        if not only or any(fnmatch.fnmatch(variant.name, pattern) for pattern in only)
    ]
    baselines = {False, *(variant.fused for variant in asked)}
    return [v for v in variants() if v in asked or (v.library == "bf16" and v.fused in baselines)]


class Step:
    """A variant's step over some tokens."""

    def __init__(self, variant: Variant, shape: tuple[int, int, int], groups: Groups) -> None:
        device = groups.ends.device
        self.experts, self.groups = variant.made(shape, device), groups
        self.called: Any = self.experts
        if variant.compiled:
            backend = "inductor" if device.type == "cuda" else "aot_eager"
            whole = variant.library == "f8sub"
            self.called = torch.compile(self.experts, dynamic=False, backend=backend, fullgraph=whole)

    def __call__(self, given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """y, dx, and the gradients of gate, up and down."""
        x, dy = given
        y = self.called(x, self.groups.ends)
        return y, *torch.autograd.grad(y, (x, *self.experts.parameters()), dy)

    def changed(self) -> None:
        """Have the weights count as changed."""
        for weight in self.experts.parameters():
            if isinstance(weight, MasterWeight):
                weight.mark_stale()

    def anew(self, given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """A call after the weights have changed."""
        self.changed()
        return self(given)


def check(name: str, found: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """SQNR of y, dx and gate's dw in dB; an error below ``FLOOR_DB``."""
    pairs = zip(("y", "dx", "dw"), found, right, strict=False)
    # Of a fused dw the first rows are gate's.
    reached = {what: sqnr(a.detach()[:, : b.shape[1]], b.detach()) for what, a, b in pairs}
    if not min(reached.values()) >= FLOOR_DB:
        raise RuntimeError(f"{name}: {reached} dB of bf16's, at least {FLOOR_DB}")
    return reached


def measure(
    shape: tuple[int, int, int, int], lie: Lie, session: Session, skipped: dict[str, str]
) -> dict[str, dict]:
    """Variant -> its figures."""
    experts, n, k, tokens = shape
    device = session.device
    groups = lie.groups(device)
    torch.manual_seed(1)
    random: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    sets = [
        (torch.randn(tokens, k, **random).requires_grad_(), torch.randn(tokens, k, **random))
        for _ in range(SETS)
    ]
    torch._dynamo.reset()
    # Without its graph, whose node for x would belong to this stream: no other could be captured.
    right = tuple(t.detach() for t in Step(Variant("bf16"), (experts, n, k), groups)(sets[0])[:3])
    timers: dict[str, Callable[[], float]] = {}
    steps: dict[str, Step] = {}
    rows: dict[str, dict] = {}
    for variant in chosen(session.only):
        if (reason := variant.why_not(device)) is not None:
            skipped[f"step {variant.name}"] = reason
            continue
        with session.attempt(f"experts step {shape} {lie.name} {variant.name}"):
            step = Step(variant, (experts, n, k), groups)
            row: dict[str, Any] = {"sqnr_db": check(variant.name, step(sets[0]), right)}
            step.changed()
            row["peak_bytes"] = peak_bytes(step, sets[0], device)
            step.changed()
            row |= kernels(step, sets[0], device)
            timers[variant.name] = by_launches(step, sets, device, step.changed)
            rows[variant.name], steps[variant.name] = row, step
    # Three products in forward, of which each has two in backward.
    tflop = 9 * 2 * n * k * tokens / 1e12
    for name, times in in_turns(timers, session.rounds).items():
        row = summary(times)
        rows[name] |= {**row, "rounds_ms": times, "tflops": tflop / row["median_ms"] * 1e3}
    compare(rows)
    if device.type == "cuda":
        graphed = by_graphs(steps, sets, session, f"experts step {shape} {lie.name}")
        for name, figures in graphed.items():
            rows[name]["graphed"] = figures
    return rows


def by_graphs(steps: dict[str, Step], sets: list[Any], session: Session, what: str) -> dict[str, dict]:
    """Variant -> median and spread in ms of its step as a CUDA graph, and how many times bf16's."""
    pool, timers = graph_pool(session.device), {}
    for name, step in steps.items():
        with session.attempt(f"{what} {name}, a graph"):
            timers[name] = by_graph(step.anew, sets, pool)
    times = in_turns(timers, session.rounds)
    found: dict[str, dict] = {name: {**summary(each), "rounds_ms": each} for name, each in times.items()}
    compare(found)
    return found


def compare(rows: dict[str, dict]) -> None:
    """Tell each how many times as fast as the fastest in bf16 it is; and the quartiles of that, round by round."""
    for name, row in rows.items():
        bf16 = [
            of
            for other, of in rows.items()
            if other.startswith("bf16") and ("fused" in other) == ("fused" in name)
        ]
        fastest = min(bf16, key=lambda row: row["median_ms"], default=None)
        row["over_bf16"] = fastest and fastest["median_ms"] / row["median_ms"]
        if fastest:
            pairs = zip(fastest["rounds_ms"], row["rounds_ms"], strict=True)
            row["over_bf16_quartiles"] = statistics.quantiles((theirs / own for theirs, own in pairs), n=4)
