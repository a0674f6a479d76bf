"""Whole training steps under FSDP2, launched and replayed by ``graph_step``: bf16, f8sub and torchao in one run.

    torchrun --nproc-per-node 4 -m scripts.bench.graphed --tokens 2048 \
        bf16 f8sub.tensorwise f8sub.tensorwise+gradients torchao

A model of transformers with random weights, its blocks compiled and sharded, AdamW in float32. Launched and replayed
steps take turns in three rounds. Rank 0 prints a table, and JSON lines with ``--json``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import f8sub

ROUNDS = 3
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SIZES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 128256},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "vocab_size": 128256},
}
LAYERS = {"8b": 32, "1b": 16, "qwen3-moe": 4}


class Model(nn.Module):
    """What a model of transformers has, called without its keyword arguments."""

    def __init__(self, whole: Any, tokens: int) -> None:
        super().__init__()
        inner = whole.model
        self.embed, self.layers, self.norm, self.head = (
            inner.embed_tokens,
            inner.layers,
            inner.norm,
            whole.lm_head,
        )
        place = torch.arange(tokens, device=self.embed.weight.device)[None]
        like = torch.zeros((), dtype=torch.bfloat16, device=place.device)
        self.position = inner.rotary_emb(like, place)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # noqa: D102
        hidden = self.embed(ids)
        for block in self.layers:
            hidden = block(hidden, position_embeddings=self.position)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def made(size: str, layers: int, tokens: int) -> Model:
    """The model, whole on each rank's device, with the same random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
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
        return Model(Qwen3MoeForCausalLM(config), tokens)
    options = {"num_key_value_heads": 8, "num_hidden_layers": layers, "max_position_embeddings": tokens}
    return Model(LlamaForCausalLM(LlamaConfig(**SIZES[size], **options, rope_parameters=rope)), tokens)


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


def prepared(
    arm: str, options: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, Callable[[], None]]:
    """The sharded model of an arm, and what makes its scales where f8sub does not."""
    with device:
        model = made(options.model, options.layers, options.tokens)
    name, *extras = arm.split("+")
    library, _, recipe = name.partition(".")
    scales: Callable[[], None] = lambda: None  # noqa: E731
    if library == "f8sub":
        f8sub.convert_to_float8(model, recipe=recipe or "tensorwise", experts="experts" in extras)
    elif library == "torchao":
        from torchao.float8 import (
            Float8LinearConfig,
            convert_to_float8_training,
            precompute_float8_dynamic_scale_for_fsdp,
        )

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, fqn: "head" not in fqn)
        scales = lambda: precompute_float8_dynamic_scale_for_fsdp(model)  # noqa: E731
    mesh = init_device_mesh(
        "cuda", (dist.get_world_size() // options.tp, options.tp), mesh_dim_names=("data", "tensor")
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
        if "ac" in extras:
            own = block.forward
            block.forward = lambda *a, own=own, **k: checkpoint(own, *a, use_reentrant=False, **k)
        if options.compile:
            model.layers[index] = torch.compile(block, dynamic=False)
    for part in (model.embed, *model.layers, model.head, model):
        fully_shard(part, mp_policy=POLICY, mesh=mesh["data"])
    if "gradients" in extras:
        f8sub.reduce_gradients_in_float8(model)
    return model, scales


class Arm:
    """One library's training of the model, launched and replayed."""

    def __init__(self, arm: str, options: argparse.Namespace, device: torch.device) -> None:
        self.model, scales = prepared(arm, options, device)
        self._device, self._tokens = device, options.tokens
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        loss_of = torch.compile(_loss, dynamic=False)

        def forward_backward(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            scales()
            loss = loss_of(self.model(ids), targets)
            loss.backward()
            return loss

        self.launched = f8sub.graph_step(forward_backward, self.model, self._optimizer, warmup=10**9)
        self.replayed = f8sub.graph_step(forward_backward, self.model, self._optimizer, warmup=3)
        # Ranks of one tensor-parallel group read the same tokens.
        rng = torch.Generator(device=device).manual_seed(dist.get_rank() // options.tp)
        size = (8, options.tokens + 1)
        self._batches = torch.randint(1000, size, device=device, generator=rng)
        self._next = 0

    def steps(self, step: Any, count: int) -> dict[str, Any]:
        """Milliseconds of a step by events, of the host's part of it, and of a loop of all."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        host, losses = [], []
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        events[0].record()
        for event in events[1:]:
            batch = self._batches[self._next % 8]
            self._next += 1
            start = time.perf_counter()
            losses.append(step(batch[None, :-1], batch[1:]))
            host.append(time.perf_counter() - start)
            event.record()
        torch.cuda.synchronize()
        loop = (time.perf_counter() - begin) / count
        steps = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        return {
            "steps": steps,
            "host": [1e3 * h for h in host],
            "loop": 1e3 * loop,
            "loss": losses[-1].item(),
        }

    def compared(self, count: int) -> list[dict[str, Any]]:
        """Figures of launched and of replayed steps, in turns."""
        self.steps(self.launched, 5)
        torch.cuda.reset_peak_memory_stats()
        found: dict[str, list[dict[str, Any]]] = {
            "launched": [self.steps(self.launched, count)],
            "replayed": [],
        }
        memory = {"launched": torch.cuda.max_memory_reserved()}
        begin = time.perf_counter()
        self.steps(self.replayed, 4)
        took = time.perf_counter() - begin
        found["replayed"].append(self.steps(self.replayed, count))
        memory["replayed"] = torch.cuda.memory_reserved()
        if self.replayed.how != "replayed":
            raise RuntimeError(f"the last step was {self.replayed.how}: {self.replayed.why_launched}")
        for _ in range(ROUNDS - 1):
            for how, step in (("launched", self.launched), ("replayed", self.replayed)):
                found[how].append(self.steps(step, count))
        arms = {"launched": self.launched, "replayed": self.replayed}
        return [
            {
                "how": how,
                **summary(found[how]),
                "over_busy": self.over_busy(step),
                "gib": memory[how] / 2**30,
                "s": took,
            }
            for how, step in arms.items()
        ]

    def over_busy(self, step: Any, count: int = 4) -> float:
        """How long steps take over the time in which a kernel or a copy of theirs runs, communication too."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self.steps(step, count)
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profiler.events() or ()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        busy, until = 0.0, spans[0][0]
        for start, end in spans:
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        return float((until - spans[0][0]) / busy)


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
        "loss": rounds[-1]["loss"],
    }


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[0].float(), targets)


def main() -> None:
    """Run the arms one after another."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arms", nargs="+", help="bf16 | f8sub[.RECIPE] | torchao, +gradients, +ac, +experts")
    parser.add_argument("--model", choices=LAYERS, default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument(
        "--tp", type=int, default=1, help="ranks that share each layer, by tokens between layers"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further arm after so many")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.layers = options.layers or LAYERS[options.model]
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch._dynamo.config.recompile_limit = 64
    begin = time.perf_counter()
    for arm in options.arms:
        if time.perf_counter() - begin > options.seconds:
            break
        torch._dynamo.reset()
        try:
            run = Arm(arm, options, device)
            rows = run.compared(options.steps)
            run.replayed.close()
            del run
        except Exception as error:
            rows = [{"how": "failed", "error": f"{type(error).__name__}: {error}"[:600]}]
        gc.collect()
        torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            for row in rows:
                told = {"arm": arm, "tokens": options.tokens, "layers": options.layers, **row}
                print(json.dumps(told), flush=True)
                if options.json is not None:
                    with options.json.open("a") as file:
                        file.write(json.dumps(told) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
