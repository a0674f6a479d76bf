"""Whole training steps under FSDP2, launched and replayed by ``graph_step``: bf16, f8sub and torchao in one run.

    torchrun --nproc-per-node 4 -m scripts.bench.graphed --tokens 2048 \
        bf16 f8sub.tensorwise f8sub.tensorwise+gradients torchao

A model of transformers with random weights, its blocks compiled and sharded; gradients are clipped and AdamW steps in
float32, torch's fused kernel or ``f8sub.optim.fuse_step``. Attention is cuDNN's first in every arm, by
``f8sub.prefer_cudnn_attention()`` around all of it; ``attention`` names the kernels that ran. Selective checkpointing
saves what torchtitan's does in every arm: attention and every second product. Launched and replayed steps take turns
in three rounds. Rank 0 prints JSON lines, and at the end a table with each arm over bf16; an arm with ``+fused`` is
compared with ``bf16+fused`` where that ran, too.

    torchrun --nproc-per-node 4 -m scripts.bench.graphed --tokens 8192 --ac selective \
        bf16 bf16+fused f8sub f8sub+fused torchao f8sub+fused+gradients+swiglu+attention
    torchrun --nproc-per-node 4 -m scripts.bench.graphed --tokens 8192 --accumulate 16 f8sub+fused
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import f8sub
from f8sub.graphs import recorded
from scripts.bench import budget
from scripts.table import Table

ROUNDS = 3
LIBRARIES = ("bf16", "f8sub", "torchao")
EXTRAS = {
    "fused": "clipping, AdamW and the new weights' amaxes in one pass: f8sub.optim.fuse_step",
    "gradients": "gradients are reduced in float8",
    "swiglu": "f8sub.keep_swiglu_input_in_float8",
    "attention": "f8sub.attend_in_float8",
    "prefetch": "forward passes prefetch the next block; converted models then gather weights where they are read",
    "experts": "experts are converted",
}
"""What follows an arm's library and recipe, after a plus sign."""
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SIZES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 128256},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "vocab_size": 128256},
}
SHAPE = ("tokens", "sequences", "layers", "accumulate", "ac", "reshard")
"""Options that each row of the figures has."""
LAYERS = {"8b": 32, "1b": 16, "qwen3-moe": 4}


class Model(nn.Module):
    """What a model of transformers has, called without its keyword arguments."""

    def __init__(self, whole: Any, tokens: int, device: torch.device) -> None:
        super().__init__()
        inner = whole.model
        self.embed, self.layers, self.norm, self.head = (
            inner.embed_tokens,
            inner.layers,
            inner.norm,
            whole.lm_head,
        )
        with device:
            like = torch.zeros((), dtype=torch.bfloat16)
            self.position = type(inner.rotary_emb)(whole.config)(like, torch.arange(tokens)[None])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # noqa: D102
        hidden = self.embed(ids)
        for block in self.layers:
            hidden = block(hidden, position_embeddings=self.position)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def made(size: str, layers: int, tokens: int, device: torch.device) -> Model:
    """The model without memory for its weights, but for a rank's device."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    rope = {"rope_type": "default", "rope_theta": 5e5}
    if size == "qwen3-moe":
        config = Qwen3MoeConfig(
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            vocab_size=151936,
            num_hidden_layers=layers,
            max_position_embeddings=tokens,
            rope_parameters=rope,
            experts_implementation="grouped_mm",
        )
        kind: Any = Qwen3MoeForCausalLM
    else:
        options = {"num_key_value_heads": 8, "num_hidden_layers": layers, "max_position_embeddings": tokens}
        config, kind = LlamaConfig(**SIZES[size], **options, rope_parameters=rope), LlamaForCausalLM
    with torch.device("meta"):
        whole = kind(config)
    return Model(whole, tokens, device)


@torch.no_grad()
def drawn(model: nn.Module, device: torch.device) -> None:
    """Give a sharded model memory, and weights that are those of every arm: norms 1, others random."""
    model.to_empty(device=device)
    torch.manual_seed(dist.get_rank())
    for weight in model.parameters():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        local.fill_(1) if weight.ndim == 1 else local.normal_(0, 0.02)


def parallelize(block: nn.Module, mesh: DeviceMesh, library: str) -> None:
    """Tensor and sequence parallelism of a block; each library gathers what its styles send."""
    column, row, module = ColwiseParallel, RowwiseParallel, PrepareModuleInput
    if library == "f8sub":
        from f8sub import tensor_parallel as of_f8sub

        column, row = of_f8sub.Float8ColwiseParallel, of_f8sub.Float8RowwiseParallel
        module = of_f8sub.PrepareFloat8ModuleInput
    elif library == "torchao":
        from torchao.float8 import float8_tensor_parallel as of_torchao

        column, row = of_torchao.Float8ColwiseParallel, of_torchao.Float8RowwiseParallel
        module = of_torchao.PrepareFloat8ModuleInput
    tokens, whole = Shard(1), Replicate()
    named = {"input_kwarg_layouts": {"hidden_states": tokens}}
    gathered = {"desired_input_kwarg_layouts": {"hidden_states": whole}}
    inputs = {
        "self_attn": {**named, **gathered, "fwd_config_submodule_fqn": "q_proj"},
        "mlp": {
            "input_layouts": tokens,
            "desired_input_layouts": whole,
            "fwd_config_submodule_fqn": "gate_proj",
        },
    }
    if module is PrepareModuleInput:
        for options in inputs.values():
            del options["fwd_config_submodule_fqn"]
    plan: dict[str, Any] = {name: module(**options) for name, options in inputs.items()}
    plan |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
    plan |= {f"self_attn.{name}_proj": column() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": column() for name in ("gate", "up")}
    plan |= {name: row(output_layouts=tokens) for name in ("self_attn.o_proj", "mlp.down_proj")}
    parallelize_module(block, mesh, plan)


def parts_of_arm(arm: str) -> tuple[str, str, set[str]]:
    """Library, recipe and extras of an arm's name.

    Raises:
        ValueError: no such library or extra.
    """
    name, *extras = arm.split("+")
    library, _, recipe = name.partition(".")
    if library not in LIBRARIES or not set(extras) <= set(EXTRAS):
        raise ValueError(f"{arm}: arms are {', '.join(LIBRARIES)}, and after + {', '.join(EXTRAS)}")
    return library, recipe or "tensorwise", set(extras)


def prepared(
    arm: str, options: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, Callable[[], None]]:
    """The sharded model of an arm, and what makes its scales where f8sub does not."""
    model = made(options.model, options.layers, options.tokens, device)
    library, recipe, extras = parts_of_arm(arm)
    scales: Callable[[], None] = lambda: None  # noqa: E731
    if library == "f8sub":
        f8sub.convert_to_float8(model, recipe=recipe, experts="experts" in extras)
    elif library == "torchao":
        from torchao.float8 import (
            Float8LinearConfig,
            convert_to_float8_training,
            precompute_float8_dynamic_scale_for_fsdp,
        )

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, fqn: "head" not in fqn)
        scales = lambda: precompute_float8_dynamic_scale_for_fsdp(model)  # noqa: E731
    if "swiglu" in extras:
        f8sub.keep_swiglu_input_in_float8(model)
    if "attention" in extras:
        f8sub.attend_in_float8(model)
    mesh = init_device_mesh(
        device.type, (dist.get_world_size() // options.tp, options.tp), mesh_dim_names=("data", "tensor")
    )
    if options.tp > 1:
        for block in model.layers:
            parallelize(block, mesh["tensor"], library)
        ends = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tensor"], ends)
    for index, block in enumerate(model.layers):
        block = checkpointed(block, options.ac)
        whole = options.model != "qwen3-moe"
        model.layers[index] = (
            torch.compile(block, dynamic=False, fullgraph=whole) if options.compile else block
        )
    for part in (model.embed, *model.layers, model.head, model):
        fully_shard(part, mp_policy=POLICY, mesh=mesh["data"], reshard_after_forward=options.reshard)
    if "gradients" in extras:
        f8sub.reduce_gradients_in_float8(model)
    if "prefetch" in extras:
        for part, following in itertools.pairwise([model.embed, *model.layers, model.head]):
            part.set_modules_to_forward_prefetch([following])
    drawn(model, device)
    return model, scales


def checkpointed(block: nn.Module, mode: str) -> nn.Module:
    """The block with no, selective or full activation checkpointing."""
    if mode == "none":
        return block
    # torchtitan's list has max, too: by it torchao's amaxes are saved.
    policy = f8sub.checkpoint_policy("bf16", save=[torch.ops.aten.max.default])
    return checkpoint_wrapper(block, **({"context_fn": policy} if mode == "selective" else {}))


class Arm:
    """One library's training of the model, launched and replayed."""

    def __init__(self, arm: str, options: argparse.Namespace, device: torch.device) -> None:
        self.model, self._scales = prepared(arm, options, device)
        self._max_norm, self._reshards = options.max_norm, options.reshard
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        is_fused = "fused" in parts_of_arm(arm)[2]
        self.fused = f8sub.optim.fuse_step(self._optimizer) if is_fused else None
        self._loss_of = torch.compile(_loss, dynamic=False)
        step = self._forward_backward
        self.launched = f8sub.graph_step(step, self.model, self._optimizer, warmup=10**9)
        self.replayed = f8sub.graph_step(step, self.model, self._optimizer, warmup=3)
        # Ranks of one tensor-parallel group read the same tokens.
        rng = torch.Generator(device=device).manual_seed(dist.get_rank() // options.tp)
        size = (8, options.accumulate, options.sequences, options.tokens + 1)
        self._batches = torch.randint(1000, size, device=device, generator=rng)
        self._next = 0

    def _forward_backward(self, batch: torch.Tensor) -> torch.Tensor:
        """Accumulate the gradients of micro-batches, each a matrix of ``batch``, and clip them."""
        self._scales()
        total = torch.zeros((), device=batch.device)
        model: Any = self.model
        for index, rows in enumerate(batch):
            is_last = index == len(batch) - 1
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            model.set_reshard_after_backward(is_last or self._reshards)
            loss = self._loss_of(model(rows[:, :-1]), rows[:, 1:]) / len(batch)
            loss.backward()
            total += loss.detach()
        if self._max_norm and self.fused is not None:
            self.fused.clip_grad_norm_(self._max_norm)
        elif self._max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), self._max_norm)
        return total

    def steps(self, step: Any, count: int) -> dict[str, Any]:
        """Milliseconds of a step by events, of the host's part of it, and of a loop of all."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        host, losses = [], []
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        events[0].record()
        with launch_times() as launches:
            for event in events[1:]:
                batch = self._batches[self._next % 8]
                self._next += 1
                start = time.perf_counter()
                losses.append(step(batch))
                host.append(time.perf_counter() - start)
                event.record()
        torch.cuda.synchronize()
        loop = (time.perf_counter() - begin) / count
        steps = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        return {
            "steps": steps,
            "host": [1e3 * h for h in host],
            "launches": launches,
            "loop": 1e3 * loop,
            "loss": losses[-1].item(),
        }

    def compared(self, count: int, *, launched: bool, apart: bool) -> list[dict[str, Any]]:
        """Figures of launched and of replayed steps, in turns; with ``apart``, of launched ones before all replays."""
        arms = {"launched": self.launched, "replayed": self.replayed}
        if not launched:
            del arms["launched"]
        found: dict[str, list[dict[str, Any]]] = {how: [] for how in arms}
        profiles: dict[str, dict[str, Any]] = {}
        memory = {}
        if launched:
            self.steps(self.launched, 5)
            torch.cuda.reset_peak_memory_stats()
            found["launched"] += [self.steps(self.launched, count) for _ in range(ROUNDS if apart else 1)]
            memory["launched"] = peaks()
            if apart:
                profiles["launched"] = self.profiled(self.launched)
        begin = time.perf_counter()
        self.steps(self.replayed, 3)
        if self.fused is not None and self.fused.why_torch is not None:
            raise RuntimeError(f"torch's kernels took the last step: {self.fused.why_torch}")
        gc.collect()
        between = torch.cuda.memory_allocated() / 2**30
        # The allocator sees a captured step once, when it is captured.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.steps(self.replayed, 1)
        took = time.perf_counter() - begin
        found["replayed"].append(self.steps(self.replayed, count))
        memory["replayed"] = peaks()
        if self.replayed.how != "replayed":
            raise RuntimeError(
                f"the last step was {self.replayed.how}, with {between:.1f} GiB between two steps: "
                f"{self.replayed.why_launched}"
            )
        for _ in range(ROUNDS - 1):
            for how, step in arms.items():
                if how not in profiles:
                    found[how].append(self.steps(step, count))
        for how, step in arms.items():
            if how not in profiles:
                profiles[how] = self.profiled(step)
        return [
            {
                "how": how,
                **summary(found[how]),
                **profiles[how],
                **memory[how],
                "between_gib": between,
                "s": took,
            }
            for how in arms
        ]

    def profiled(self, step: Any, count: int = 2) -> dict[str, Any]:
        """How long steps take over the time in which a kernel or a copy of theirs runs, communication too.

        And the kernels of attention, milliseconds and numbers of a step's kernels by kind, and the longest by name.
        """
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self.steps(step, count)
        events = [
            event for event in profiler.events() or () if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        spans = sorted((event.time_range.start, event.time_range.end) for event in events)
        busy, until = 0.0, spans[0][0]
        for start, end in spans:
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        named = {event.name for event in events if re.search("flash|fmha|sdpa|attention", event.name, re.I)}
        ms: dict[str, float] = defaultdict(float)
        by_name: dict[str, float] = defaultdict(float)
        kernels: Counter[str] = Counter()
        for event in events:
            kind, took = budget.kind_of(event.name), event.time_range.elapsed_us() / 1e3 / count
            ms[kind] += took
            by_name[event.name[:80]] += took
            kernels[kind] += 1
        longest = sorted(by_name, key=lambda name: -by_name[name])[:40]
        return {
            "over_busy": float((until - spans[0][0]) / busy),
            "kinds_ms": {kind: round(ms[kind], 2) for kind in sorted(ms)},
            "kinds_kernels": {kind: kernels[kind] / count for kind in sorted(kernels)},
            "longest_ms": {name: round(by_name[name], 3) for name in longest},
            "attention": sorted(name[:60] for name in named),
        }


def peaks() -> dict[str, float]:
    """The most memory that was active and reserved, in GiB."""
    found = torch.cuda.memory_stats()
    return {f"{kind}_gib": found[f"{kind}_bytes.all.peak"] / 2**30 for kind in ("active", "reserved")}


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with tokens per second of a GPU, and speed and memory over the same row of bf16.

    That is ``over_bf16``; ``over_bf16_fused`` is over bf16 with ``fuse_step``, of arms that have that.
    """
    of = {(row["arm"], row["how"]): row for row in rows if "loop_ms" in row}
    found = []
    for row in rows:
        row = dict(row)
        for name, column in (("bf16", "over_bf16"), ("bf16+fused", "over_bf16_fused")):
            other = of.get((name, row["how"]))
            if other is None or "loop_ms" not in row or ("fused" in column) > ("fused" in row["arm"]):
                continue
            row[column] = other["loop_ms"] / row["loop_ms"]
            if name == "bf16":
                for kind in ("active", "reserved"):
                    row[f"{kind}_over_bf16"] = row[f"{kind}_gib"] / other[f"{kind}_gib"]
        found.append(row)
    return found


COLUMNS = (
    ("ms", "{loop_ms:.1f}"),
    ("spread", "{spread_ms:.1f}"),
    ("tokens/s a GPU", "{tokens_per_second:,.0f}"),
    ("over bf16", "{over_bf16:.3f}"),
    ("over bf16+fused", "{over_bf16_fused:.3f}"),
    ("active GiB", "{active_gib:.1f}"),
    ("over bf16", "{active_over_bf16:.3f}"),
    ("reserved GiB", "{reserved_gib:.1f}"),
    ("over bf16", "{reserved_over_bf16:.3f}"),
    ("loss", "{loss:.4f}"),
)


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds; the spread is that of the rounds' loops."""
    steps = sorted(step for each in rounds for step in each["steps"][1:])
    loops = [each["loop"] for each in rounds]
    return {
        "loop_ms": statistics.median(loops),
        "spread_ms": max(loops) - min(loops),
        "step_ms": statistics.median(steps),
        "slowest_tenth": steps[len(steps) // 2] / steps[int(0.9 * len(steps))],
        # Of a step that finds the GPU idle: a later one waits until the replay before it has ended.
        "host_ms": statistics.median(each["host"][0] for each in rounds),
        # Of those, torch's launch of the graph; the rest is Python.
        "launch_ms": statistics.median((each["launches"] or [0.0])[0] for each in rounds),
        "host_ms_by_round": [[round(ms, 2) for ms in each["host"]] for each in rounds],
        "loss": rounds[-1]["loss"],
    }


@contextmanager
def launch_times() -> Iterator[list[float]]:
    """Collect how long the host takes to launch each graph in this block, in milliseconds."""
    found: list[float] = []
    own = recorded.Recorded.replay

    def replay(graph: recorded.Recorded) -> None:
        start = time.perf_counter()
        own(graph)
        found.append(1e3 * (time.perf_counter() - start))

    recorded.Recorded.replay = replay  # type: ignore[method-assign]
    try:
        yield found
    finally:
        recorded.Recorded.replay = own  # type: ignore[method-assign]


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arms = "; ".join(f"+{name}: {what}" for name, what in EXTRAS.items())
    parser.add_argument("arms", nargs="+", help=f"bf16 | f8sub[.RECIPE] | torchao, with {arms}")
    parser.add_argument("--model", choices=LAYERS, default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--sequences", type=int, default=1, help="of a micro-batch of a rank")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--ac", choices=("none", "selective", "full"), default="none")
    parser.add_argument(
        "--max-norm", type=float, default=1.0, help="gradients are clipped to it; 0: they are not"
    )
    parser.add_argument(
        "--reshard",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="gather the weights in each forward and backward; else once a step",
    )
    parser.add_argument(
        "--tp", type=int, default=1, help="ranks that share each layer, by tokens between layers"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--apart",
        action="store_true",
        help="all launched steps before the capture: beside a graph they need their memory once more",
    )
    parser.add_argument(
        "--launched",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure launched steps, too",
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further arm after so many")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.layers = options.layers or LAYERS[options.model]
    for arm in options.arms:
        try:
            parts_of_arm(arm)
        except ValueError as error:
            parser.error(str(error))
    return options


def rows_of(arm: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Figures of one arm, or why it failed."""
    torch._dynamo.reset()
    rows = _rows_of(arm, options, device)
    gc.collect()
    torch.cuda.empty_cache()
    tokens = options.tokens * options.sequences * options.accumulate / options.tp
    for row in rows:
        if "loop_ms" in row:
            row["tokens_per_second"] = 1e3 * tokens / row["loop_ms"]
    shape = {name: getattr(options, name) for name in SHAPE}
    return [{"arm": arm, **shape, **row} for row in rows]


def _rows_of(arm: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    # In a function of its own, whose frame an error would keep, and with it the arm's memory.
    try:
        run = Arm(arm, options, device)
        rows = run.compared(options.steps, launched=options.launched, apart=options.apart)
        run.replayed.close()
    except Exception as error:
        return [{"how": "failed", "error": f"{type(error).__name__}: {error}"[:600]}]
    return rows


def main() -> None:
    """Run the arms one after another."""
    options = parsed()
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch._dynamo.config.recompile_limit = 64
    begin = time.perf_counter()
    found: list[dict[str, Any]] = []
    with f8sub.prefer_cudnn_attention():
        for arm in options.arms:
            if time.perf_counter() - begin > options.seconds:
                break
            rows = rows_of(arm, options, device)
            found += rows
            for row in rows if dist.get_rank() == 0 else ():
                print(json.dumps(row), flush=True)
    if dist.get_rank() == 0:
        found = compared(found)
        Table.of("", [(f"{row['arm']} {row['how']}", row) for row in found], COLUMNS).show()
        if options.json is not None:
            with options.json.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
