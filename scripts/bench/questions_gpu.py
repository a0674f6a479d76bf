"""Whole steps, products, memory and power of a GPU where a good guess may be wrong: torch and NCCL, without f8sub.

    python scripts/bench/questions_gpu.py --json one.json
    torchrun --nproc-per-node 2 scripts/bench/questions_gpu.py --json two.json

One line for each question: name, guess, measured. The guesses were written before the first run. A part of the
questions: ``--only NAME ...``. On a CPU nothing is asked, and the questions are listed.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

Question = tuple[str, Callable[[], str]]
ONE: dict[str, Question] = {}
TWO: dict[str, Question] = {}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOPS = {E4M3: 448.0, E5M2: 57344.0}


def asks(guess: str, of: dict[str, Question] = ONE) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Note a question with its guess; the function's name is the question's, what it returns was measured."""

    def note(run: Callable[[], str]) -> Callable[[], str]:
        of[run.__name__] = guess, run
        return run

    return note


# What several questions need


def gpu() -> torch.device:
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def ms(run: Callable[[int], Any], calls: int = 12, rounds: int = 5) -> float:
    """Milliseconds of a call, as a CUDA graph of ``calls``, so that the host does not count."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(3):
            run(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(calls):
            run(index)
    found = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / calls)
    return statistics.median(found)


def codes(rows: int, cols: int, dtype: torch.dtype = E4M3, values: float = 1.0) -> torch.Tensor:
    return (torch.randn(rows, cols, device=gpu()) * values).clamp(-TOPS[dtype], TOPS[dtype]).to(dtype)


def one() -> torch.Tensor:
    return torch.ones((), device=gpu())


def cast(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of one scale per tensor, and the inverse scale."""
    scale = TOPS[dtype] / x.abs().amax().float().clamp(min=1e-30)
    return (x.float() * scale).clamp(-TOPS[dtype], TOPS[dtype]).to(dtype), scale.reciprocal()


def db(found: torch.Tensor, right: torch.Tensor) -> float:
    error = (found.double() - right.double()).square().sum()
    return float(10 * torch.log10(right.double().square().sum() / error)) if error else float("inf")


class Feed(nn.Module):
    """A feed-forward, by relu squared or by SwiGLU."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind, self.hidden = kind, 4 * width
        self.up = nn.Linear(width, self.hidden, bias=False)
        self.gate = nn.Linear(width, self.hidden, bias=False) if kind == "swiglu" else None
        self.down = nn.Linear(self.hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give y of x (batch, rows, width)."""
        up = self.up(x)
        return self.down(F.relu(up).square() if self.gate is None else F.silu(self.gate(x)) * up)


class Block(nn.Module):
    """Attention and a feed-forward."""

    def __init__(self, width: int, kind: str, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.feed, self.dropout = Feed(width, kind), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give y of x (batch, rows, width)."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 128)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.o(y), self.dropout)
        return x + self.feed(self.norms[1](x))


class Language(nn.Module):
    """A decoder."""

    def __init__(
        self,
        layers: int = 2,
        width: int = 1024,
        tokens: int = 8192,
        kind: str = "swiglu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, kind, dropout) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Give the loss of the next tokens of ids (batch, rows)."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1)[:-1].float(), ids.flatten()[1:])


def language(**options: Any) -> Language:
    torch.manual_seed(0)
    return Language(**options).to(gpu(), torch.bfloat16)


def text(sequences: int, length: int, tokens: int = 8192, seed: int = 0) -> torch.Tensor:
    """Sequences in which a token mostly follows from the last one, some of the tokens much more frequent."""
    generator = torch.Generator().manual_seed(seed)
    rules = torch.Generator().manual_seed(99)
    follower = torch.randint(tokens, (tokens,), generator=rules)
    shares = (1 / torch.arange(1, tokens + 1)).float()
    fresh = torch.multinomial(shares, sequences * length, replacement=True, generator=generator)
    fresh = fresh.view(sequences, length)
    follows = torch.rand(sequences, length, generator=generator) < 0.8
    for column in range(1, length):
        fresh[:, column] = torch.where(follows[:, column], follower[fresh[:, column - 1]], fresh[:, column])
    return fresh.to(gpu())


# Determinism


def differing(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> str:
    """Which gradients of one step differ from run to run, of four runs."""
    runs = []
    for _ in range(4):
        model.zero_grad()
        run(ids).backward()
        runs.append([p.grad.clone() for p in model.parameters()])
    names = [name for name, _ in model.named_parameters()]
    same = [all(torch.equal(other[i], runs[0][i]) for other in runs[1:]) for i in range(len(names))]
    unequal = [name for name, equal in zip(names, same, strict=True) if not equal]
    return f"{len(unequal)} of {len(names)}" + (f" ({', '.join(unequal[-2:])} ...)" if unequal else "")


@asks(
    "gradients of an eager step differ run to run with flash and with cuDNN (atomic dq), repeat with efficient and math"
)
def eager_step_repeats() -> str:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model, ids, found = language(), text(4, 1024), []
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        with sdpa_kernel(getattr(SDPBackend, name)):
            found.append(f"{name.split('_')[0].lower()} {differing(model, model, ids)}")
    return "differ: " + "; ".join(found)


@asks(
    "the compiled step differs through the embedding's atomics alone; deterministic algorithms end it for 5 % of time"
)
def compiled_step_repeats() -> str:
    model, ids = language(), text(4, 1024)
    found, times = [], []
    for strict in (False, True):
        torch._dynamo.reset()
        torch.use_deterministic_algorithms(strict)
        try:
            compiled = torch.compile(model, dynamic=False)
            found.append(differing(model, compiled, ids))
            times.append(launched_ms(lambda step=compiled: step(ids).backward()))
        finally:
            torch.use_deterministic_algorithms(False)
    return (
        f"differ: {found[0]}; with deterministic algorithms {found[1]}; {times[0]:.2f} and {times[1]:.2f} ms"
    )


def launched_ms(run: Callable[[], Any], rounds: int = 10) -> float:
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / rounds


@asks(
    "a row's result does not hang on how many other rows there are in float8 (no split of K); it does in bf16"
)
def rows_alone() -> str:
    x, w = codes(4096, 8192), codes(1024, 8192)
    row = torch.rand(4096, 1, device=gpu()) + 0.5
    col = torch.rand(1, 1024, device=gpu()) + 0.5
    scales = {"tensorwise": (one(), one()), "row-wise": (row, col)}
    found = []
    for name, (a, b) in scales.items():
        whole = torch._scaled_mm(x, w.t(), a, b, out_dtype=torch.bfloat16, use_fast_accum=True)
        unequal = []
        for rows in (16, 64, 256, 1024):
            part = a if a.dim() == 0 else a[:rows]
            y = torch._scaled_mm(x[:rows], w.t(), part, b, out_dtype=torch.bfloat16, use_fast_accum=True)
            unequal.append(f"{(y != whole[:rows]).float().mean().item():.1%}")
        found.append(f"{name} {unequal}")
    whole = x.bfloat16() @ w.bfloat16().t()
    unequal = [
        f"{(x[:rows].bfloat16() @ w.bfloat16().t() != whole[:rows]).float().mean().item():.1%}"
        for rows in (16, 64, 256, 1024)
    ]
    return f"elements that differ with 16, 64, 256, 1024 of 4096 rows: {'; '.join(found)}; bf16 {unequal}"


# CUDA graphs


def captured(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


@asks("replays drop the same elements as eager steps do from the same seed, bitwise")
def graph_dropout() -> str:
    model, ids = language(dropout=0.3), text(2, 512)
    loss = torch.zeros((), device=gpu())

    def step() -> None:
        loss.copy_(model(ids).detach())

    torch.manual_seed(5)
    eager = []
    for _ in range(4):
        step()
        eager.append(loss.item())
    graph = captured(step)
    torch.manual_seed(5)
    replayed = []
    for _ in range(4):
        graph.replay()
        replayed.append(loss.item())
    return f"losses of four steps: eager {[f'{x:.6f}' for x in eager]}, replayed {[f'{x:.6f}' for x in replayed]}"


@asks("a captured step keeps its activations: allocated as before the step, reserved twice an eager step's")
def graph_memory() -> str:
    model, ids = language(layers=4), text(8, 1024)

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model(ids).backward()

    step()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak, eager = torch.cuda.max_memory_allocated() - base, torch.cuda.memory_reserved()
    graph = captured(step)
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    kept = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    graph.replay()
    torch.cuda.synchronize()
    seen = torch.cuda.max_memory_allocated() - before
    g = 2**30
    return (
        f"peak of an eager step {peak / g:.2f} GiB, reserved {eager / g:.2f}; after the capture {reserved / g:.2f}, "
        f"with empty_cache {kept / g:.2f}; allocated {before / g:.2f} of {base / g:.2f}; a replay's peak {seen / g:.2f}"
    )


# Fast accumulation on a trained model's own tensors


def trained(kind: str) -> tuple[Language, torch.Tensor, float]:
    tokens = 2048
    model = language(layers=4, tokens=tokens, kind=kind).float()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    batches = text(64, 512, tokens).split(8)
    for step in range(300):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1.0, (step + 1) / 50)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batches[step % len(batches)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, text(16, 512, tokens, seed=1), loss.item()


def products_of(
    model: Language, ids: torch.Tensor
) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """x, w and dy of each linear layer."""
    found: dict[str, list[torch.Tensor]] = {}

    def forward(name: str) -> Callable[..., None]:
        return lambda module, args, out: found.__setitem__(name, [args[0].detach(), module.weight.detach()])

    def backward(name: str) -> Callable[..., None]:
        return lambda module, grads, outs: found[name].append(outs[0].detach())

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "head":
            module.register_forward_hook(forward(name))
            module.register_full_backward_hook(backward(name))
    with torch.autocast("cuda", torch.bfloat16):
        model(ids).backward()
    return {name: tuple(x.flatten(0, -2) for x in tensors) for name, tensors in found.items()}  # type: ignore[misc]


def accumulation(
    a: torch.Tensor, b: torch.Tensor, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[float, ...]:
    """DB of a @ b.t() by fast accumulation, by the other, of the casts; and the bias of the first, relative."""
    (x, of_x), (w, of_w) = cast(a.contiguous(), dtypes[0]), cast(b.contiguous(), dtypes[1])
    right = x.double() @ w.double().t()
    found = [
        torch._scaled_mm(x, w.t(), one(), one(), out_dtype=torch.float32, use_fast_accum=fast).double()
        for fast in (True, False)
    ]
    exact = a.double() @ b.double().t()
    bias = ((found[0] - right) * right.sign()).sum() / right.abs().sum()
    casts = db(right * (of_x.double() * of_w.double()), exact)
    return db(found[0], right), db(found[1], right), casts, float(bias)


def accumulations(kind: str) -> str:
    model, ids, loss = trained(kind)
    lines, rows = [], []
    for name, (x, w, dy) in products_of(model, ids).items():
        for product, a, b, dtypes in (
            ("y", x, w, (E4M3, E4M3)),
            ("dx", dy, w.t(), (E5M2, E4M3)),
            ("dw", dy.t(), x.t(), (E5M2, E4M3)),
        ):
            rows.append((f"{product} of {name.removeprefix('blocks.')}", *accumulation(a, b, dtypes)))
    rows.sort(key=lambda row: row[1])
    for row in rows[:4] + rows[-1:]:
        lines.append(f"{row[0]} {row[1]:.1f} dB (other {row[2]:.1f}, casts {row[3]:.1f}), bias {row[4]:+.3%}")
    for product in ("y", "dx", "dw"):
        ours = [row for row in rows if row[0].startswith(product + " ")]
        lines.append(
            f"all {product}: {ours[0][1]:.1f} to {ours[-1][1]:.1f} dB, largest bias {min(r[4] for r in ours):+.3%}"
        )
    return f"loss {loss:.2f}; " + "; ".join(lines)


@asks(
    "fast accumulation is 15 dB better than the casts in every layer; bias below 0.1 %; down of relu squared worst"
)
def fast_accumulation_relu_squared() -> str:
    return accumulations("relu2")


@asks("the same for SwiGLU, all layers within 3 dB of each other; dw (8,192 tokens) 5 dB worse than y")
def fast_accumulation_swiglu() -> str:
    return accumulations("swiglu")


# Products by shape


def teraflops(m: int, n: int, k: int, how: str = "tensorwise", **options: Any) -> float:
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True} | options
    if how == "bf16":
        sets = [
            (torch.randn(m, k, device=gpu()).bfloat16(), torch.randn(n, k, device=gpu()).bfloat16())
            for _ in range(2)
        ]
        time = ms(lambda i: sets[i % 2][0] @ sets[i % 2][1].t())
    else:
        sets = [(codes(m, k), codes(n, k)) for _ in range(2)]
        scales = (one(), one())
        if how == "row-wise":
            scales = torch.ones(m, 1, device=gpu()), torch.ones(1, n, device=gpu())
        time = ms(lambda i: torch._scaled_mm(sets[i % 2][0], sets[i % 2][1].t(), *scales, **options))
    return 2e-9 * m * n * k / time


def speeds(shapes: dict[str, tuple[int, int, int]], hows: tuple[str, ...], **options: Any) -> str:
    found = []
    for name, shape in shapes.items():
        values = []
        for how in hows:
            try:
                values.append(f"{teraflops(*shape, how=how, **options):.0f}")
            except (RuntimeError, ValueError) as error:
                values.append(f"{type(error).__name__}: {str(error).splitlines()[0][:90]}")
        found.append(f"{name}: {' / '.join(values)}")
    return f"TFLOP/s, {' / '.join(hows)}: " + "; ".join(found)


ALL = ("tensorwise", "row-wise", "bf16")


@asks("16 to 256 rows by 8192x8192: twice bf16's speed at each, row-wise as fast as tensorwise")
def few_rows() -> str:
    return speeds({f"{m} rows": (m, 8192, 8192) for m in (16, 32, 64, 128, 256)}, ALL)


@asks("2048x2048 with K of 4k, 32k and 64k: 700, 900, 900 for float8 (64 to 256 tiles), bf16 half of it")
def long_sums() -> str:
    return speeds({f"K {k}": (2048, 2048, k) for k in (4096, 32768, 65536)}, ALL)


@asks("N of 4096 + 16 or + 128 costs 3 %, as one more column of tiles does; 4096 + 8 is refused")
def odd_columns() -> str:
    return speeds({f"N {n}": (8192, n, 4096) for n in (4096, 4104, 4112, 4224, 4352)}, ALL)


@asks("8200 or 8193 rows in place of 8192 cost 2 %")
def odd_rows() -> str:
    return speeds({f"{m} rows": (m, 4096, 4096) for m in (8192, 8193, 8200, 8208, 8320)}, ALL)


@asks("K of 4096 + 16 or + 64 costs 2 %")
def odd_sums() -> str:
    return speeds({f"K {k}": (8192, 4096, k) for k in (4096, 4112, 4160, 4224)}, ALL)


@asks("float32 out costs 10 % tensorwise and is refused row-wise; a bias costs 1 % in both")
def epilogues() -> str:
    shape = {"8192x4096x4096": (8192, 4096, 4096)}
    bias = torch.randn(4096, device=gpu())
    found = [
        f"bf16: {speeds(shape, ALL[:2])}",
        f"float32: {speeds(shape, ALL[:2], out_dtype=torch.float32)}",
        f"bias: {speeds(shape, ALL[:2], bias=bias.bfloat16())}",
        f"float32 and bias: {speeds(shape, ALL[:2], out_dtype=torch.float32, bias=bias)}",
    ]
    return "; ".join(found)


@asks("without fast accumulation tensorwise keeps 75 % of its speed, row-wise 90 %")
def other_accumulation() -> str:
    shape = {"8192x4096x4096": (8192, 4096, 4096), "4096x14336x8192": (4096, 14336, 8192)}
    return f"fast {speeds(shape, ALL[:2])}; not {speeds(shape, ALL[:2], use_fast_accum=False)}"


# Power


@asks(
    "zeros and a constant are 15 % faster than gaussian codes; random bytes 5 % slower; gaussian small ones as gaussian"
)
def power() -> str:
    size, found = 8192, []
    bits = torch.randint(0, 256, (size, size), device=gpu(), dtype=torch.int32).to(torch.uint8)
    bits = torch.where((bits & 127) == 127, bits - 1, bits).view(E4M3)
    gaussian = torch.randn(size, size, device=gpu())
    data = {
        "gaussian": (gaussian * 100).clamp(-448, 448).to(E4M3),
        "zeros": torch.zeros(size, size, device=gpu()).to(E4M3),
        "ones": torch.ones(size, size, device=gpu()).to(E4M3),
        "random bytes": bits,
        "gaussian, subnormal": (gaussian * 0.004).to(E4M3),
        "positive": (gaussian.abs() * 100).clamp(-448, 448).to(E4M3),
        "nine of ten zero": (gaussian * (torch.rand_like(gaussian) < 0.1) * 100).clamp(-448, 448).to(E4M3),
        "gaussian again": (gaussian * 100).clamp(-448, 448).to(E4M3),
    }
    for name, x in data.items():
        w, scales = x.flip(0).contiguous(), (one(), one())
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for index in range(2000):
            if index == 1000:
                start.record()
            torch._scaled_mm(x, w.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)
        end.record()
        time.sleep(0.8)
        fields = "--query-gpu=clocks.sm,power.draw.instant"
        said = subprocess.run(
            ["nvidia-smi", "-i", "0", fields, "--format=csv,noheader,nounits"],
            check=False,
            capture_output=True,
            text=True,
        ).stdout.strip()
        end.synchronize()
        found.append(f"{name} {2e-9 * size**3 * 1000 / start.elapsed_time(end):.0f} ({said})")
    return "TFLOP/s (MHz, W): " + "; ".join(found)


# Casts


@asks("compiled casts are eager's, bitwise: e4m3 of 1000, inf and 1e-4, e5m2 of 1e5 and inf")
def compiled_casts() -> str:
    x = torch.tensor([448.0, 463.0, 464.0, 465.0, 1000.0, 1e5, float("inf"), float("nan")], device=gpu())
    found = []
    for dtype, kind in itertools.product((E4M3, E5M2), (torch.float32, torch.bfloat16)):
        values = x.to(kind)

        def casts(x: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            return (x * 1.0).to(dtype)

        torch._dynamo.reset()
        eager, compiled = casts(values), torch.compile(casts)(values)
        host = casts(values.cpu())
        found.append(
            f"{dtype} of {kind}: eager {eager.float().tolist()}, compiled {compiled.float().tolist()}, "
            f"CPU {host.float().tolist()}"
        )
    return "; ".join(found)


# Memory by settings of the allocator


def memory_child() -> None:
    """Steps of changing lengths: what they need, and what is reserved for them."""
    model = language(layers=8)
    torch.manual_seed(1)
    lengths = (torch.rand(40) * 3584 + 512).int().tolist()
    for length in lengths:
        model.zero_grad()
        model(torch.randint(8192, (4, length), device=gpu())).backward()
    stats = torch.cuda.memory_stats()
    print(
        f"{torch.cuda.max_memory_allocated() / 2**30:.2f} needed, {torch.cuda.max_memory_reserved() / 2**30:.2f} "
        f"reserved, {stats['num_alloc_retries']} retries"
    )


@asks(
    "lengths that change: 1.3 times as much reserved as needed by default, 1.05 with expandable segments, 1.2 rounded"
)
def memory_settings() -> str:
    settings = ("", "expandable_segments:True", "roundup_power2_divisions:8", "max_split_size_mb:256")
    runs = {
        name or "default": subprocess.Popen(
            [sys.executable, __file__, "--child", "memory"],
            env={**os.environ, "PYTORCH_ALLOC_CONF": name, "PYTORCH_CUDA_ALLOC_CONF": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in settings
    }
    found = []
    for name, run in runs.items():
        out, err = run.communicate(timeout=100)
        found.append(f"{name}: {out.strip() or err.strip().splitlines()[-1]}")
    return "GiB: " + "; ".join(found)


# Last, since a capture that fails may leave something behind


@asks(
    "a rate in a CPU tensor is a constant of the graph, as a float is; AdamW refuses it where it is captured"
)
def graph_rate_on_the_host() -> str:
    found = []
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        for place in ("cpu", "cuda"):
            p = nn.Parameter(torch.ones(64, device=gpu()))
            p.grad = torch.ones_like(p)
            rate = torch.tensor(0.1, device=place)
            name = f"{options} {place}"
            try:
                optimizer = torch.optim.AdamW([p], lr=rate, capturable=True, weight_decay=0.0, **options)
                graph = captured(optimizer.step)
                rate.fill_(0.0)
                before = p.detach().clone()
                graph.replay()
                moved = (p - before).abs().max().item()
                found.append(f"{name}: moves by {moved:.2f} at a rate of 0")
            except (RuntimeError, ValueError) as error:
                found.append(f"{name}: {type(error).__name__} {str(error)[:60]}")
                torch.cuda.set_stream(torch.cuda.default_stream())
    return "; ".join(found)


# Two GPUs


def side_by_side(product: Callable[[], Any], collective: Callable[[], Any], stream: torch.cuda.Stream) -> str:
    """Milliseconds of a product alone and beside a collective, and of the collective."""
    calls, times = 30, []

    def queue(run: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        return start, end

    for beside in ("product", "collective", "both"):
        dist.barrier()
        torch.cuda.synchronize()
        found = {}
        if beside != "product":
            with torch.cuda.stream(stream):
                if beside == "both":
                    for _ in range(calls // 2):
                        collective()
                found["collective"] = queue(collective)
                if beside == "both":
                    for _ in range(4 * calls):
                        collective()
        if beside != "collective":
            if beside == "both":
                for _ in range(calls // 3):
                    product()
            found["product"] = queue(product)
            if beside == "both":
                for _ in range(calls):
                    product()
        torch.cuda.synchronize()
        times.append({name: start.elapsed_time(end) / calls for name, (start, end) in found.items()})
    return (
        f"product {times[0]['product']:.3f} -> {times[2]['product']:.3f}, "
        f"collective {times[1]['collective']:.3f} -> {times[2]['collective']:.3f} ms"
    )


def overlap_cases() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    x, w, scale = codes(8192, 8192), codes(8192, 8192), one()
    xb, wb = x.bfloat16(), w.bfloat16()
    rows, cols = torch.ones(8192, 1, device=gpu()), torch.ones(1, 8192, device=gpu())
    part = torch.empty(2**26, device=gpu(), dtype=torch.bfloat16)
    whole = torch.empty(2**27, device=gpu(), dtype=torch.bfloat16)
    fast = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    products = {
        "tensorwise": lambda: torch._scaled_mm(x, w.t(), scale, scale, **fast),
        "row-wise": lambda: torch._scaled_mm(x, w.t(), rows, cols, **fast),
        "bf16": lambda: xb @ wb.t(),
    }
    collectives = {
        "gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    return {
        f"{a}, {b}": (product, collective)
        for a, product in products.items()
        for b, collective in collectives.items()
    }


@asks(
    "8192 cubed beside a collective takes 15 % longer in float8 and in bf16; the collective 20 % longer",
    TWO,
)
def beside_a_collective() -> str:
    stream = torch.cuda.Stream(priority=-1)
    return "; ".join(f"{name}: {side_by_side(*pair, stream)}" for name, pair in overlap_cases().items())


@asks("leaving 24 SMs to NCCL by torch's carve-out makes both faster side by side", TWO)
def beside_a_collective_with_a_carveout() -> str:
    stream = torch.cuda.Stream(priority=-1)
    try:
        torch._C._set_sm_carveout_experimental(24)
        cases = {name: pair for name, pair in overlap_cases().items() if "gather" in name}
        return "; ".join(f"{name}: {side_by_side(*pair, stream)}" for name, pair in cases.items())
    finally:
        torch._C._set_sm_carveout_experimental(None)


@asks(
    "a small gather behind queued products ends 0.1 ms after its launch with priority, and after one product without",
    TWO,
)
def start_beside_products() -> str:
    x, w, scale = codes(8192, 8192), codes(8192, 8192), one()
    part = torch.empty(2**18, device=gpu(), dtype=torch.bfloat16)
    whole = torch.empty(2**19, device=gpu(), dtype=torch.bfloat16)
    found = []
    for high in (False, True):
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high)
        group = dist.new_group(pg_options=options)
        for kind in ("float8", "bf16"):
            xb, wb = x.bfloat16(), w.bfloat16()

            def product(kind: str = kind, xb: torch.Tensor = xb, wb: torch.Tensor = wb) -> Any:
                if kind == "bf16":
                    return xb @ wb.t()
                return torch._scaled_mm(x, w.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)

            stream = torch.cuda.Stream(priority=-1 if high else 0)
            times = []
            for attempt in range(6):
                dist.barrier()
                torch.cuda.synchronize()
                start, ready, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
                start.record()
                for _ in range(5):
                    product()
                ready.record()
                for _ in range(20):
                    product()
                stream.wait_event(ready)
                with torch.cuda.stream(stream):
                    dist.all_gather_into_tensor(whole, part, group=group)
                    end.record()
                torch.cuda.synchronize()
                if attempt:
                    times.append(ready.elapsed_time(end))
            single = launched_ms(product)
            found.append(
                f"{kind}, {'high' if high else 'normal'} priority: {statistics.median(times):.2f} "
                f"(largest {max(times):.2f}) ms; a product {single:.2f} ms"
            )
    return "; ".join(found)


@asks("NCCL's MAX drops a NaN of either rank, in float32 and in bf16", TWO)
def maximum_of_nan() -> str:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for rank in (0, 1):
            x = torch.ones(4, device=gpu(), dtype=dtype)
            if dist.get_rank() == rank:
                x[1] = float("nan")
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
            everywhere = torch.empty(2, 4, device=gpu(), dtype=dtype)
            dist.all_gather_into_tensor(everywhere.flatten(), x)
            found.append(f"{dtype}, NaN on rank {rank}: {everywhere[:, 1].tolist()}")
    return "; ".join(found)


def sharded(layers: int = 4, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = Language(layers=layers, **options).to(gpu())
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    for block in model.blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)


def trained_twice(compiles: bool) -> str:
    ids = text(4, 1024, seed=dist.get_rank())
    runs = []
    for _ in range(3):
        model, optimizer = sharded()
        if compiles:
            for block in model.blocks:
                block.compile(dynamic=False)
        losses = []
        for _ in range(8):
            loss = model(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs.append((losses, [p.to_local().detach().clone() for p in model.parameters()]))
    names = [name for name, _ in model.named_parameters()]
    unequal = [
        name
        for i, name in enumerate(names)
        if not all(torch.equal(other[1][i], runs[0][1][i]) for other in runs[1:])
    ]
    first = next((i + 1 for i in range(8) if len({run[0][i] for run in runs}) > 1), None)
    return f"{len(unequal)} of {len(names)} shards differ after 8 steps, losses from step {first} on"


@asks("three runs of 8 FSDP2 steps, eager (flash): all shards differ at the end, losses from step 2 on", TWO)
def sharded_steps_repeat() -> str:
    return trained_twice(False)


@asks("the same with compiled blocks", TWO)
def sharded_compiled_steps_repeat() -> str:
    return trained_twice(True)


def lengths_under(setting: str) -> str:
    torch.cuda.empty_cache()
    if setting:
        torch.cuda.memory._set_allocator_settings(setting)
    model, optimizer = sharded(layers=8)
    torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator().manual_seed(1)
    for length in (torch.rand(24, generator=generator) * 3584 + 512).int().tolist():
        model(torch.randint(8192, (4, length), device=gpu())).backward()
        optimizer.step()
        optimizer.zero_grad()
    needed, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    del model, optimizer
    return f"{setting or 'default'}: {needed / 2**30:.2f} needed, {reserved / 2**30:.2f} reserved"


@asks(
    "FSDP2 with lengths that change: 1.25 times as much reserved as needed, 1.05 with expandable segments",
    TWO,
)
def sharded_memory_settings() -> str:
    found = [lengths_under(""), lengths_under("expandable_segments:True")]
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    return "GiB: " + "; ".join(found)


@asks(
    "torch.cuda.graph takes a whole FSDP2 step, clipping and AdamW included; replays equal launched steps bitwise with "
    "deterministic kernels; hooks run in the capture alone; reserved 1.5 times a launched step's",
    TWO,
)
def sharded_graph() -> str:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ids, g = text(4, 1024, seed=dist.get_rank()), 2**30
    results, said = {}, []
    for how in ("launched", "replayed"):
        torch.cuda.empty_cache()
        model, optimizer = sharded(layers=6)
        calls = []
        model.blocks[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        loss = torch.zeros((), device=gpu())

        def step(
            model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer, loss: torch.Tensor = loss
        ) -> None:
            found = model(ids)
            found.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.copy_(found.detach())

        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            losses = []
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(4):
                    step()
                    losses.append(loss.item())
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            base = torch.cuda.memory_reserved()
            if how == "replayed":
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    step()
                step = graph.replay
            for _ in range(6):
                step()
                losses.append(loss.item())
            begin = time.perf_counter()
            for _ in range(5):
                step()
            torch.cuda.synchronize()
            taken = (time.perf_counter() - begin) * 200
        steps = optimizer.state[next(model.parameters())]["step"].item()
        said.append(
            f"{how}: {taken:.2f} ms, reserved {base / g:.2f} -> {torch.cuda.memory_reserved() / g:.2f} GiB, "
            f"hook called {len(calls)} times, optimizer's step {steps:.0f}"
        )
        results[how] = losses
    equal = [a == b for a, b in zip(results["launched"], results["replayed"], strict=True)]
    return (
        "; ".join(said)
        + f"; losses equal: {equal}; {results['launched'][-1]:.5f} {results['replayed'][-1]:.5f}"
    )


@asks(
    "torch.cuda.graph in its default error mode fails beside NCCL, whose watchdog queries events from a thread",
    TWO,
)
def graph_beside_the_watchdog() -> str:
    x = torch.ones(2**20, device=gpu())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            dist.all_reduce(x)
    torch.cuda.synchronize()
    found = []
    for seconds in (0.0, 0.5):
        outcomes = []
        for _ in range(4):
            graph = torch.cuda.CUDAGraph()
            try:
                dist.all_reduce(x)
                with torch.cuda.graph(graph, stream=stream):
                    dist.all_reduce(x)
                    time.sleep(seconds)
                outcomes.append("captured")
            except RuntimeError as error:
                outcomes.append(str(error).splitlines()[0][:80])
        found.append(f"{seconds} s: {outcomes}")
    return "; ".join(found)


def memory_of_all() -> None:
    torch.cuda.synchronize()
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def main() -> None:
    """Ask what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--child", default="")
    parser.add_argument(
        "--limit", type=float, default=140, help="seconds after which no further question is asked"
    )
    options = parser.parse_args()
    both = "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1
    questions = TWO if both else ONE
    if not torch.cuda.is_available():
        for name, (guess, _) in {**ONE, **TWO}.items():
            print(f"{name} | {guess} | no GPU")
        return
    if not both:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms ask for it
    torch.cuda.set_device(gpu())
    if options.child:
        memory_child()
        return
    if both:
        dist.init_process_group("nccl", device_id=gpu(), timeout=datetime.timedelta(seconds=60))
    chatty = not both or dist.get_rank() == 0
    if chatty:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {nccl}", flush=True)
    found, begin = [], time.monotonic()
    for name, (guess, run) in questions.items():
        if options.only and name not in options.only:
            continue
        late = torch.tensor(float(time.monotonic() - begin > options.limit), device=gpu())
        if both:
            dist.all_reduce(late)
        start = time.monotonic()
        try:
            measured = run() if not late.item() else "not asked: late"
        # A question that fails must not keep the others from being asked.
        except Exception as error:
            measured = f"{type(error).__name__}: {str(error)[:300]}"
        memory_of_all()
        found.append(
            {"name": name, "guess": guess, "measured": measured, "seconds": time.monotonic() - start}
        )
        if chatty:
            print(f"{name} | {guess} | {measured} | {found[-1]['seconds']:.1f} s", flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
    if both:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
