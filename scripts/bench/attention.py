"""Measures attention in float8 beside cuDNN's bf16 attention: time, accuracy, memory, and the step of a few blocks.

Needs a Hopper GPU and nvidia-cudnn-frontend (1.23.0 is known to work). Every line is JSON and printed at once; a case
that fails is a line with its error.

    python scripts/bench/attention.py --seconds 150

case "time": milliseconds of forward, backward and both, with all casts from and to bf16; ``saved_mb`` and ``peak_mb``
of one forward and backward beyond the inputs; ``host_ms`` to launch both, and of that within cuDNN's graphs. Where
transformer_engine is installed, its DotProductAttention in float8 is an arm of "time" and of "accuracy".
case "accuracy": SQNR in dB of o, dq, dk, dv against float32 attention of the same bf16 inputs, of the kernels and of
f8sub's reference; ``close_db`` is of the kernels against the reference.
case "step": forward and backward of Llama 3 8B blocks, compiled, arms in turns; ``over_bf16`` is speed.
``--smoke`` runs the reference with small shapes on any device.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import math
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import f8sub
from f8sub.attention import cudnn, ops
from f8sub.attention.scaling import HISTORY

T0 = time.time()
HEADS, KV_HEADS, WIDTH = 32, 8, 128
SHAPES = [(1, 8192), (4, 2048), (1, 32768)]
BACKWARDS = ("e4m3", "bf16")
NAMES = ("o", "dq", "dk", "dv")


class Session:
    def __init__(self, seconds: float, smoke: bool) -> None:
        self.seconds, self.smoke = seconds, smoke
        self.device = "cpu" if smoke and not torch.cuda.is_available() else "cuda"
        self.backend = "reference" if smoke else "cudnn"

    def left(self) -> float:
        return self.seconds - (time.time() - T0)

    def attempt(self, case: str, needs: float, function: Callable[..., Any], *args: Any) -> Any:
        """Run one case; print what goes wrong."""
        if self.left() < needs:
            return say(case=case, skipped=f"{self.left():.0f} s left, {needs} wanted")
        try:
            return function(self, *args)
        except Exception as error:
            where = traceback.format_exc().strip().splitlines()[-6:-1]
            say(case=case, error=type(error).__name__, message=str(error)[:2000], where=where)
            if self.device == "cuda":
                with contextlib.suppress(Exception):
                    torch.cuda.synchronize()
        finally:
            if self.device == "cuda":
                torch.cuda.empty_cache()
        return None

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def median_ms(self, run: Callable[[], Any], repeats: int = 15, warm: int = 3) -> float:
        if self.device == "cpu":
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        for _ in range(warm):
            run()
        torch.cuda.synchronize()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        # About 40 ms: the host gets ahead, so that launches are not what is timed.
        torch.cuda._sleep(80_000_000)
        for before, after in pairs:
            before.record()
            run()
            after.record()
        torch.cuda.synchronize()
        return statistics.median(before.elapsed_time(after) for before, after in pairs)

    def host_ms(self, run: Callable[[], Any]) -> list[float]:
        """Medians of what a call keeps the host, and of the part of it within cuDNN's graphs."""
        within: list[float] = []
        launch = cudnn._run

        def timed(*given: Any) -> None:
            start = time.perf_counter()
            launch(*given)
            within[-1] += time.perf_counter() - start

        taken = []
        cudnn._run = timed
        try:
            for _ in range(1 if self.smoke else 10):
                self.synchronize()
                within.append(0.0)
                start = time.perf_counter()
                run()
                taken.append(time.perf_counter() - start)
        finally:
            cudnn._run = launch
        self.synchronize()
        return [round(1e3 * statistics.median(each), 3) for each in (taken, within)]

    def allocated_mb(self) -> float:
        return torch.cuda.memory_allocated() / 2**20 if self.device == "cuda" else 0.0


def say(**line: Any) -> None:
    print(json.dumps({"t": round(time.time() - T0, 1), **line}), flush=True)


def inputs(
    session: Session, batch: int, length: int, kind: str, heads: int = HEADS, kv_heads: int = KV_HEADS
) -> list[torch.Tensor]:
    """q, k, v and dO in bf16, (batch, heads, length, WIDTH), in memory as linear layers leave them."""
    generator = torch.Generator(session.device).manual_seed(1)
    made = [
        torch.randn(batch, length, h, WIDTH, device=session.device, generator=generator)
        for h in (heads, kv_heads, kv_heads, heads)
    ]
    if kind == "outliers":  # a few channels of each, 8 to 16 times as large
        for x, channels, factor in zip(
            made, ([11, 90], [5, 37, 70, 101], [3, 64], [20, 99]), (8, 12, 16, 16), strict=True
        ):
            x[..., channels] *= factor
    made[3] *= 1e-3
    return [x.bfloat16().transpose(1, 2) for x in made]


class Float8:
    """Attention in float8 by the operator, with a state."""

    def __init__(self, session: Session, backward: str, backend: str | None = None) -> None:
        self.backward, self.backend = backward, backend or session.backend
        self.state = [torch.zeros(n, device=session.device) for n in ((HISTORY, 4), 4, 1)]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ops.attend(q, k, v, *self.state, True, WIDTH**-0.5, self.backend, self.backward)


class TransformerEngine:
    """TransformerEngine's attention in float8, by delayed scaling as its documentation has it."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling, Format

        self.heads, recipe = heads, DelayedScaling(fp8_format=Format.HYBRID, fp8_dpa=True)
        # Its newer name first.
        autocast: Any = getattr(te, "autocast", None)
        self.context = (
            functools.partial(autocast, enabled=True, recipe=recipe)
            if autocast is not None
            else functools.partial(te.fp8_autocast, enabled=True, fp8_recipe=recipe)
        )
        self.attention = te.DotProductAttention(
            heads, WIDTH, num_gqa_groups=kv_heads, attn_mask_type="causal", qkv_format="bshd"
        )

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with self.context():
            o = self.attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return o.unflatten(-1, (self.heads, WIDTH)).transpose(1, 2)


def why_no_peer() -> str | None:
    if importlib.util.find_spec("transformer_engine") is None:
        return "transformer_engine is not installed: pip install --no-build-isolation 'transformer_engine[pytorch]'"
    return None


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def time_one(session: Session, name: str, call: Any, batch: int, length: int) -> None:
    q, k, v, do = inputs(session, batch, length, "gauss")
    for x in (q, k, v):
        x.requires_grad_()

    def both() -> None:
        torch.autograd.grad(call(q, k, v), (q, k, v), do)

    both()
    session.synchronize()
    before = session.allocated_mb()
    if session.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    o = call(q, k, v)
    saved = session.allocated_mb() - before
    torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    session.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**20 - before if session.device == "cuda" else 0.0
    backward = session.median_ms(functools.partial(torch.autograd.grad, o, (q, k, v), do, retain_graph=True))
    with torch.no_grad():
        forward = session.median_ms(lambda: call(q, k, v))
    say(
        case="time", kind=name, batch=batch, length=length, forward_ms=round(forward, 3),
        backward_ms=round(backward, 3), both_ms=round(session.median_ms(both), 3),
        host_ms=session.host_ms(both), saved_mb=round(saved, 1), peak_mb=round(peak, 1),
    )  # fmt: skip


def time_peer(session: Session, batch: int, length: int) -> None:
    time_one(session, "TransformerEngine, float8", TransformerEngine(HEADS, KV_HEADS), batch, length)


def times(session: Session, batch: int, length: int) -> None:
    with f8sub.prefer_cudnn_attention():
        session.attempt("time bf16", 3, time_one, "bf16 sdpa", sdpa, batch, length)
    for backward in BACKWARDS:
        call = Float8(session, backward)
        session.attempt(f"time {backward}", 3, time_one, f"float8, backward {backward}", call, batch, length)
    if why_no_peer() is None:
        session.attempt("time TransformerEngine", 3, time_peer, batch, length)
    with f8sub.prefer_cudnn_attention():
        session.attempt("time bf16", 3, time_one, "bf16 sdpa, again", sdpa, batch, length)


def db(x: torch.Tensor, reference: torch.Tensor) -> float | str:
    noise = (x.double() - reference.double()).square().sum().item()
    if not math.isfinite(noise):
        return "not finite"
    signal = reference.double().square().sum().item()
    return round(10 * math.log10(signal / noise), 2) if noise > 0 else "exact"


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> list[torch.Tensor]:
    """o, dq, dk, dv in float32, a head of k at a time."""
    torch.backends.cuda.matmul.allow_tf32 = False
    group = q.shape[1] // k.shape[1]
    made: list[list[torch.Tensor]] = [[], [], [], []]
    unseen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    for i in range(k.shape[1]):
        heads = slice(i * group, (i + 1) * group)
        given = [x.float().detach().requires_grad_() for x in (q[:, heads], k[:, i : i + 1], v[:, i : i + 1])]
        p = given[0] @ given[1].transpose(-1, -2) * WIDTH**-0.5
        o = p.masked_fill(unseen, -math.inf).softmax(-1) @ given[2]
        grads = torch.autograd.grad(o, given, do[:, heads].float())
        for found, x in zip(made, (o.detach(), *grads), strict=True):
            found.append(x)
    return [torch.cat(x, 1) for x in made]


def results(call: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    *qkv, do = given
    x = [t.detach().requires_grad_() for t in qkv]
    o = call(*x)
    return [o.detach(), *torch.autograd.grad(o, x, do)]


def accuracy(session: Session, kind: str, length: int, heads: int, kv_heads: int) -> None:
    given = inputs(session, 1, length, kind, heads, kv_heads)
    wanted = exact(*given)
    line = {"case": "accuracy", "inputs": kind, "length": length, "heads": heads}

    def told(name: str, made: list[torch.Tensor], **other: Any) -> None:
        pairs = zip(NAMES, made, wanted, strict=True)
        say(**line, kind=name, db={n: db(x, w) for n, x, w in pairs}, **other)

    told("bf16 sdpa", results(sdpa, given))
    for backward in ("e4m3", "e5m2", "bf16") if length <= 4096 else ("e4m3", "e5m2"):
        call, same = Float8(session, backward), Float8(session, backward, "reference")
        # The second has scales of the first.
        made = [results(call, given) for _ in range(2)][1]
        expected = [results(same, given) for _ in range(2)][1]
        close = {n: db(x, e) for n, x, e in zip(NAMES, made, expected, strict=True)}
        amaxes = [[float(f"{a:.4g}") for a in s.state[0][0].tolist()] for s in (call, same)]
        saturated = call.state[1].tolist()
        told(f"backward {backward}", made, close_db=close, amaxes=amaxes, saturated=saturated)
        told(f"backward {backward}, reference", expected)
    if why_no_peer() is None:
        peer = TransformerEngine(heads, kv_heads)
        told("TransformerEngine, float8", [results(peer, given) for _ in range(2)][1])


class Block(nn.Module):
    """A block of Llama 3 8B, or a smaller one."""

    def __init__(self, dim: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, dim // heads
        sizes = {"q": (dim, dim), "k": (dim, kv_heads * self.width), "v": (dim, kv_heads * self.width)}
        sizes |= {"o": (dim, dim), "gate": (dim, hidden), "up": (dim, hidden), "down": (hidden, dim)}
        for name, (fan_in, fan_out) in sizes.items():
            self.add_module(name, nn.Linear(fan_in, fan_out, bias=False))
        self.norm_1, self.norm_2 = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.norm_1(x)
        shape = (*y.shape[:2], -1, self.width)
        q, k, v = (layer(y).view(shape) for layer in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (turned(q, cos, sin), turned(k, cos, sin), v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(o.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


ARMS = {  # linear layers in float8; backward of attention in float8, or None for bf16 attention
    "bf16": (False, None),
    "f8sub": (True, None),
    "f8sub, attention float8": (True, "float8"),
    "f8sub, attention float8, backward bf16": (True, "bf16"),
}


class Arm:
    def __init__(self, session: Session, name: str, blocks: int) -> None:
        sizes = (512, 128, 4, 2) if session.smoke else (4096, 14336, HEADS, KV_HEADS)
        linear, backward = ARMS[name]
        torch.manual_seed(0)
        with torch.device(session.device):
            model = nn.ModuleList([Block(*sizes) for _ in range(blocks)]).bfloat16()
        if linear:
            f8sub.convert_to_float8(model, "tensorwise", min_dim=0 if session.smoke else None)
        if backward is not None:
            f8sub.attend_in_float8(model, backward=backward, min_length=0, backend=session.backend)
        for block in model:
            block.compile(dynamic=False, backend="aot_eager" if session.smoke else "inductor")
        self.model, self.linear, self.width = model, linear, sizes[0] // sizes[2]

    def step(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        if self.linear:
            f8sub.precompute_scales(self.model)
        y = x
        for block in self.model:
            y = block(y, cos, sin)
        y.backward(x.detach())
        for parameter in self.model.parameters():
            parameter.grad = None


def steps(session: Session, length: int, names: list[str], blocks: int = 4) -> None:
    torch._dynamo.reset()
    arms: dict[str, Arm] = {}
    runs: dict[str, Callable[[], None]] = {}
    peaks: dict[str, float] = {}
    dim = 512 if session.smoke else 4096
    x = torch.randn(1, length, dim, device=session.device).bfloat16().requires_grad_()
    for name in names:
        start = time.time()

        def prepare(session: Session, name: str = name) -> None:
            arm = Arm(session, name, blocks)
            half = arm.width // 2
            angles = torch.arange(length, device=session.device)[:, None] * 0.5 ** torch.arange(
                half, device=session.device
            )
            cos, sin = (t.bfloat16()[None, :, None, :] for t in (angles.cos(), angles.sin()))
            arm.step(x, cos, sin)
            arm.step(x, cos, sin)
            session.synchronize()
            before = session.allocated_mb()
            if session.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            arm.step(x, cos, sin)
            session.synchronize()
            if session.device == "cuda":
                peaks[name] = torch.cuda.max_memory_allocated() / 2**20 - before
            arms[name], runs[name] = arm, lambda: arm.step(x, cos, sin)

        session.attempt(f"step {name}", 12, prepare)
        if name in runs:
            ready = round(time.time() - start, 1)
            say(case="step", arm=name, length=length, ready_s=ready, peak_mb=round(peaks.get(name, 0.0)))
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(3):  # in turns, so that all arms see the same clock
        for name, run in runs.items():
            if session.left() > 1:
                found[name].append(session.median_ms(run, repeats=4, warm=1))
    medians = {name: statistics.median(taken) for name, taken in found.items() if taken}
    for name, taken in medians.items():
        over = round(medians["bf16"] / taken, 3) if "bf16" in medians else None
        say(
            case="step", arm=name, length=length, blocks=blocks, ms=round(taken, 2), over_bf16=over,
            spread=[round(t, 2) for t in found[name]],
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    session = Session(options.seconds, options.smoke)
    why = None if session.smoke else cudnn.why_not(torch.device("cuda"))
    name = torch.cuda.get_device_name() if session.device == "cuda" else "cpu"
    say(device=name, torch=torch.__version__, cudnn=torch.backends.cudnn.version(), why_not=why)
    say(peer="TransformerEngine", why_not=why_no_peer())
    if why is not None:
        return
    shapes = [(1, 64), (2, 32), (1, 96)] if session.smoke else SHAPES
    short, long = (64, 96) if session.smoke else (8192, 32768)
    times(session, *shapes[0])
    for kind in ("gauss", "outliers"):
        session.attempt(f"accuracy {kind}", 5, accuracy, kind, 64 if session.smoke else 2048, 4, 1)
    names = list(ARMS)
    session.attempt("step", 20, steps, short, names[:3])
    for shape in shapes[1:]:
        times(session, *shape)
    session.attempt("step", 20, steps, long, names[:3])
    for kind in ("gauss", "outliers"):
        session.attempt(f"accuracy {kind}", 5, accuracy, kind, short, 4, 1)
    session.attempt("accuracy long", 5, accuracy, "gauss", long, 1, 1)
    session.attempt("step", 20, steps, long, [names[0], names[3]])
    say(done=True)


if __name__ == "__main__":
    main()
