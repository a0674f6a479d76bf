"""Reductions of FSDP2's gradients on GPUs of one host: torch's in float32 and bfloat16, and f8sub's in float8.

pack: a layer's gradients into FSDP2's buffer, for 2, 8 and 64 ranks, on one GPU: chunk_cat to float32 and bfloat16, the
    cast to e4m3 (with several sizes of a program), the sum of so many ranks' codes, and a copy of as many bytes.
layers: all of a reduction of a Llama 3 8B and a 70B layer over the ranks: copy into the buffer, exchange, sum.
step: a training step of a Llama 3 8B with recipe tensorwise, compiled, and selective activation checkpointing, by how
    its gradients are reduced. Float32 comes twice, first and last, to show what clocks and heat do.

Sums are compared with torch's in float32 before they are timed. Times are medians of the slowest rank. Without CUDA
everything runs on the CPU, tiny, to show that it runs.

    torchrun --nproc-per-node 2 scripts/bench/gradients.py --json gradients.json
    torchrun --nproc-per-node 2 scripts/bench/gradients.py --group step --blocks 32 --tokens 8192
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import f8sub
from f8sub.gradients import wire
from f8sub.gradients.reduction import Float8ReduceScatter
from f8sub.gradients.wire import chunk_size, layout_of
from scripts.bench.gpu.llama import Batch, Trainer
from scripts.bench.gpu.variants import Variant
from scripts.bench.ranks import process_group
from scripts.bench.timing import by_launches, machine, sqnr
from scripts.table import Table, parser, write_json

GROUPS = ("pack", "layers", "step")
LAYERS = {"8B layer": (4096, 1024, 14336), "70B layer": (8192, 1024, 28672)}
"""Features of the hidden states, of keys and values, of the feed-forward."""
TINY = {"tiny layer": (64, 32, 128)}
WORLDS = (2, 8, 64)
PROGRAMS = (16, 32, 64, 128)
LEAST_DB = 30.0
"""Of random gradients of two ranks: 31.4 dB, with what bfloat16 takes."""

Shapes = list[tuple[int, ...]]


def shapes_of(hidden: int, keys: int, forward: int) -> Shapes:
    """Weights of one layer as FSDP2 has them: q, k, v, o, gate, up, down, and two norms."""
    projections = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    return [*projections, (forward, hidden), (forward, hidden), (hidden, forward), (hidden,), (hidden,)]


def random_gradients(shapes: Shapes, device: torch.device) -> list[torch.Tensor]:
    rng = torch.Generator(device).manual_seed(int(os.environ.get("RANK", 0)))
    return [torch.randn(shape, device=device, generator=rng).bfloat16() for shape in shapes]


def micros(run: Callable[[Any], Any], device: torch.device, rounds: int, alone: bool = False) -> float:
    """Median microseconds of a call, on the slowest rank; ``alone``, where others do not take part."""
    timer = by_launches(run, [None] * 2, device)
    timer()
    found = torch.tensor(statistics.median(timer() for _ in range(rounds)) * 1e3, device=device)
    if not alone:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def packing(
    shapes: Shapes, world: int, device: torch.device, rounds: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Microseconds, bytes and their rate, of what one GPU does for a reduction over ``world`` ranks."""
    gradients = random_gradients(shapes, device)
    elements = sum(gradient.numel() for gradient in gradients)
    layout = layout_of(tuple(chunk_size(shape, world) for shape in shapes))

    def figures(run: Callable[[Any], Any], size: float) -> dict[str, float]:
        us = micros(run, device, rounds)
        return {"us": us, "bytes": size, "tb_per_s": size / us / 1e6}

    for dtype in (torch.float32, torch.bfloat16):
        flat = torch.empty(world, layout.numel, dtype=dtype, device=device)
        yield (
            f"chunk_cat to {dtype}",
            figures(
                lambda _, flat=flat: torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=world, out=flat),
                elements * (2 + dtype.itemsize),
            ),
        )
        del flat
    sources = [
        wire.GradientChunks(gradient.view(-1), chunk.size, gradient.numel())
        for gradient, chunk in zip(gradients, layout.chunks, strict=True)
    ]
    for blocks in PROGRAMS if device.type == "cuda" else (wire.PACKED,):
        with mock.patch.object(wire, "PACKED", blocks):
            size = 2 * elements + world * layout.row_bytes
            run = lambda _: wire.pack(sources, layout, world)  # noqa: E731
            yield f"pack, {blocks} blocks a program", figures(run, size)
    received, out = wire.pack(sources, layout, world), torch.empty(layout.numel, device=device)
    for blocks in PROGRAMS[:3] if device.type == "cuda" else (wire.ADDED,):
        with mock.patch.object(wire, "ADDED", blocks):
            size = received.numel() + 4 * layout.numel
            run = lambda _: wire.add(received, layout, 1 / world, out)  # noqa: E731
            yield f"sum, {blocks} blocks a program", figures(run, size)
    half = torch.empty_like(received.view(-1))
    yield "copy", figures(lambda _: half.copy_(received.view(-1)), 2 * received.numel())


def torchs(gradients: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """As ``foreach_reduce`` does it: into a flat buffer, and its mean over the ranks."""
    ranks, device = dist.get_world_size(), gradients[0].device
    size = sum(chunk_size(gradient.shape, ranks) for gradient in gradients)
    flat, out = (torch.empty(n, dtype=dtype, device=device) for n in (ranks * size, size))
    torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=ranks, out=flat.view(ranks, -1))
    # The name before torch 2.13.
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    getattr(dist, name)(out, flat, op=dist.ReduceOp.AVG)
    return out


def ours(gradients: list[torch.Tensor], comm: Float8ReduceScatter) -> torch.Tensor:
    ranks, device = dist.get_world_size(), gradients[0].device
    size = sum(chunk_size(gradient.shape, ranks) for gradient in gradients)
    flat = comm.allocate((ranks * size,), dtype=torch.float32, device=device)
    torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=ranks, out=flat.view(ranks, -1))
    out = comm.allocate((size,), dtype=torch.float32, device=device)
    comm(out, flat, dist.group.WORLD, dist.ReduceOp.AVG)
    return out


def reducing(shapes: Shapes, device: torch.device, rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Microseconds of a whole reduction, relative to torch's too, and dB of the sums."""
    gradients, comm = random_gradients(shapes, device), Float8ReduceScatter(None, None, 0)
    right, found = torchs(gradients, torch.float32), ours(gradients, comm)
    if not sqnr(found, right) >= LEAST_DB:
        raise RuntimeError(f"float8 sums are {sqnr(found, right):.1f} dB of float32's, not {LEAST_DB}")
    runs = {
        "float32": lambda _: torchs(gradients, torch.float32),
        "bfloat16": lambda _: torchs(gradients, torch.bfloat16),
        "float8": lambda _: ours(gradients, comm),
    }
    times = {name: micros(run, device, rounds) for name, run in runs.items()}
    decibels = {"bfloat16": sqnr(torchs(gradients, torch.bfloat16), right), "float8": sqnr(found, right)}
    for name, us in times.items():
        over = {"of_float32": us / times["float32"], "of_bfloat16": us / times["bfloat16"]}
        yield name, {"us": us, **over, "db": decibels.get(name)}


def steps(arguments: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, dict[str, float]]]:
    """Milliseconds of a step, tokens a second and peak memory of a rank."""
    size, tokens, blocks = arguments.size, arguments.tokens, arguments.blocks
    variant = Variant("f8sub", "tensorwise", compiled=device.type == "cuda")
    torch.manual_seed(1)
    batches = [Batch.random(size, tokens, device) for _ in range(2)]
    for name in ("float32", "bfloat16", "float8", "float32 again"):
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        trainer = Trainer(variant, size, tokens, device, blocks, "selective", dtype)
        if name == "float8":
            f8sub.reduce_gradients_in_float8(trainer.model)
        for batch in batches:
            loss = trainer.step(batch)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        ms = micros(lambda i, run=trainer: run.step(batches[0]), device, arguments.rounds) / 1e3
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        yield name, {"ms": ms, "tokens_per_s": tokens / ms * 1e3, "peak": peak, "loss": float(loss)}
        del trainer
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def parsed() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--group", nargs="+", choices=GROUPS, default=list(GROUPS))
    made.add_argument("--rounds", type=int, default=10)
    made.add_argument("--blocks", type=int, default=32, help="of the model of a step")
    made.add_argument("--tokens", type=int, default=8192, help="of a rank's sequence")
    made.add_argument("--tiny", action="store_true", help="sizes that a CPU takes, which are its default")
    return made.parse_args()


def measured(arguments: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[Table]]:
    """Figures by group, and their tables."""
    layers = TINY if arguments.tiny else LAYERS
    found: dict[str, Any] = {}
    tables = []
    for name, features in layers.items():
        for world in WORLDS if "pack" in arguments.group else ():
            rows = dict(packing(shapes_of(*features), world, device, arguments.rounds))
            found[f"pack {name}, {world} ranks"] = rows
            columns = (("us", "{us:.0f}"), ("TB/s", "{tb_per_s:.2f}"))
            tables.append(Table.of(f"one GPU of {world} ranks, {name}", rows.items(), columns))
        if "layers" in arguments.group:
            rows = found[f"layers {name}"] = dict(reducing(shapes_of(*features), device, arguments.rounds))
            columns = (
                ("us", "{us:.0f}"),
                ("of float32", "{of_float32:.2f}"),
                ("of bfloat16", "{of_bfloat16:.2f}"),
                ("dB", "{db:.1f}"),
            )
            tables.append(
                Table.of(f"reduction over {dist.get_world_size()} ranks, {name}", rows.items(), columns)
            )
    if "step" in arguments.group:
        rows = found["step"] = dict(steps(arguments, device))
        columns = (
            ("ms", "{ms:.1f}"),
            ("tokens/s of a rank", "{tokens_per_s:.0f}"),
            ("peak GB", "{peak/1e9:.1f}"),
        )
        title = (
            f"step of a Llama 3 {arguments.size}, {arguments.blocks} blocks, {arguments.tokens} tokens a rank"
        )
        tables.append(Table.of(title, rows.items(), columns))
    return found, tables


def main() -> None:
    arguments = parsed()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_gpu else torch.device("cpu")
    arguments.tiny |= not has_gpu
    arguments.size = "tiny" if arguments.tiny else "8b"
    if arguments.tiny:
        arguments.blocks, arguments.tokens, arguments.rounds = 2, 32, 2
    before = machine(device)
    with process_group(device):
        found, tables = measured(arguments, device)
    if int(os.environ.get("RANK", 0)) == 0:
        for table in tables:
            table.show()
        print(f"{before['device']}, torch {before['torch']}, {int(os.environ.get('WORLD_SIZE', 1))} ranks")
        if arguments.json:
            write_json(arguments.json, {"before": before, "after": machine(device), "figures": found})


if __name__ == "__main__":
    main()
