"""Steps of torchtitan 0.3 with f8sub, as its own trainer runs them: forward and backward are a CUDA graph by default.

    torchrun --nproc-per-node 2 -m scripts.bench.titan_0_3 bf16 f8sub torchao
    torchrun --nproc-per-node 4 -m scripts.bench.titan_0_3 --model qwen3 --layers 4 --tokens 4096 bf16 f8sub

Llama 3 8B, Qwen3-30B-A3B or DeepSeek-V3 by torchtitan's own configs, or Llama 4 Scout by ``titan_llama4.py``:
torchtitan's attention, its loss in chunks and its AdamW. Blocks are compiled, as ``--compile.enable`` has it. An arm is
``bf16``; ``torchao``: torchtitan's converters, which have rowwise scales and gather in bf16, of experts too as
``torchao:{"experts":true}``; or ``f8sub``, with options of ``f8sub.titan.Float8Converter`` as JSON after a colon, such
as ``f8sub:{"recipe_name":"rowwise"}``. Arms run one after another in one process. Rank 0 prints JSON lines and a table.
A step's time is that of a window of steps; with three windows the spread is the distance of the fastest from the
slowest. Text and tokenizer are of the standard library's sources.

    torchrun --nproc-per-node 4 -m scripts.bench.titan_0_3 --model qwen3 --experts-on 4 --dispatch minimal_async_ep \
        --ac full bf16 f8sub
    torchrun --nproc-per-node 2 -m scripts.bench.titan_0_3 --model deepseek_v3 --layers 2 --experts 64 --tokens 4096 \
        --ac full bf16 'torchao:{"experts":true}' 'f8sub:{"experts":true}'

``--layers`` leaves one of the dense layers that DeepSeek-V3 has before its first layer with experts, so that two of its
layers are one of each. ``--experts`` leaves fewer experts per layer, which are as wide, and as many per token: each has
more tokens than in the whole model.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.torch_version import TorchVersion

from scripts.table import Table

WINDOWS = 3
FLAVORS = {"llama3": "8B", "qwen3": "30B-A3B", "llama4": "17bx16e", "deepseek_v3": "671B"}
CONFIGS = {
    "llama3": "llama3_8b",
    "qwen3": "qwen3_30b_a3b",
    "llama4": "llama4_17bx16e",
    "deepseek_v3": "deepseek_v3_671b",
}
REGISTRIES = {"llama4": "scripts.bench.titan_llama4"}
"""Modules of configs and models, where torchtitan has none."""
CHECKPOINTS = {"full": "FullAC", "selective": "SelectiveAC", "none": None}
DISPATCHES = "standard", "minimal_async_ep"
COLUMNS = (
    ("layers", "{layers}"),
    ("ms", "{step_ms:.1f}"),
    ("spread", "{spread_ms:.1f}"),
    ("tokens/s a GPU", "{tokens_per_second:,.0f}"),
    ("over bf16", "{over_bf16:.3f}"),
    ("active GiB", "{active_gib:.1f}"),
    ("reserved GiB", "{reserved_gib:.1f}"),
    ("graphs", "{captured}"),
    ("loss", "{loss:.4f}"),
)


def cut(layers: list[Any], number: int) -> None:
    """Leave ``number`` layers, in place, and of the dense ones before the first with experts one."""
    dense = next((at for at, layer in enumerate(layers) if layer.moe is not None), 0)
    del layers[1:dense]
    del layers[number:]


def give_experts(layers: list[Any], number: int) -> None:
    """Change how many experts each layer has that has some; their width, and how many there are per token, stay."""
    for moe in (layer.moe for layer in layers if layer.moe is not None):
        routed = moe.routed_experts
        for part in (moe, moe.router, routed.inner_experts, routed.token_dispatcher):
            part.num_experts = number
        moe.router.gate.out_features = number


def layers_in_words(layers: list[Any]) -> str:
    """Return such as ``"1 dense, 1 of 64 experts"``."""
    experts = Counter(layer.moe.num_experts for layer in layers if layer.moe is not None)
    dense = len(layers) - experts.total()
    found = [f"{count} of {number} experts" for number, count in experts.items()]
    return ", ".join([f"{dense} dense", *found] if dense else found)


def converters_of(options: argparse.Namespace, *, experts: bool = False) -> list[Any]:
    """Return torchtitan's own converters, as its float8 config of DeepSeek-V3 has them; of experts if asked for."""
    from torchtitan.components.quantization import Float8GroupedExpertsConverter, Float8LinearConverter

    how = {"model_compile_enabled": options.compile}
    linears = Float8LinearConverter.Config(filter_fqns=["lm_head", "router.gate"], **how)
    return [linears, *[Float8GroupedExpertsConverter.Config(**how)] * experts]


def config_of(arm: str, options: argparse.Namespace, folder: Path) -> Any:
    """Return torchtitan's config of an arm.

    Raises:
        ValueError: no such arm.
    """
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.models.common.config_utils import decoder_vocab_size

    from f8sub import titan

    home = REGISTRIES.get(options.model, f"torchtitan.models.{options.model}.config_registry")
    registry = importlib.import_module(home)
    name, _, given = arm.partition(":")
    if name not in ("bf16", "f8sub", "torchao"):
        raise ValueError(f"{arm}: arms are bf16, f8sub and torchao")
    config: Any = getattr(registry, options.config)()
    how: dict[str, Any] = {"attn_backend": options.attention}
    if options.model != "llama3":
        how["moe_comm_backend"] = options.dispatch
    config.model_spec = registry.model_registry(options.flavor, **how)
    model = config.model_spec.model
    if options.layers:
        cut(model.layers, options.layers)
    if options.experts:
        give_experts(model.layers, options.experts)
    if options.loss == "whole":
        config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    if name == "torchao":
        for converter in converters_of(options, **json.loads(given or "{}")):
            converter.build().convert(model)
    if name == "f8sub":
        titan.float8(model, **json.loads(given or "{}"))
        config.model_spec = titan.with_precompute_scales(config.model_spec)
    config.hf_assets_path, config.dataloader.dataset_path = str(folder / "tokenizer"), str(folder / "data")
    config.dataloader.dataset, config.dump_folder = "c4_test", str(folder)
    config.training.local_batch_size, config.training.seq_len = options.sequences, options.tokens
    config.training.steps = options.skip + WINDOWS * options.steps
    config.parallelism.expert_parallel_degree = options.experts_on
    if torch.__version__ < TorchVersion("2.14"):
        # FSDP2 cannot shard yet as torchtitan's default asks it to.
        config.parallelism.spmd_backend = "partial_dtensor"
    kind = CHECKPOINTS[options.ac]
    config.activation_checkpoint = None if kind is None else getattr(activation_checkpoint, kind).Config()
    config.compile.enable, config.compile.components = options.compile, ["model", "loss"]
    config.training.disable_cuda_graphs = not options.graphs
    config.profiler.enable_profiling = config.metrics.enable_tensorboard = config.validator.enable = False
    config.metrics.log_freq = 10**9
    config.debug.seed = 0
    return config


def measured(trainer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return milliseconds of a step, by windows after the first ``skip`` steps, and memory."""
    ends: list[float] = []
    run: Callable[[Iterator[Any]], Any] = trainer.train_step
    losses: list[Any] = []
    backward = trainer.forward_backward_step

    def remembered(**given: Any) -> Any:
        loss = backward(**given)
        losses[:] = [loss]
        return loss

    def timed(batches: Iterator[Any]) -> None:
        if len(ends) == options.skip:
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
        elif (len(ends) - options.skip) % options.steps == 0:
            torch.accelerator.synchronize()
        ends.append(time.perf_counter())
        run(batches)

    trainer.train_step, trainer.forward_backward_step = timed, remembered
    trainer.train()
    torch.accelerator.synchronize()
    ends.append(time.perf_counter())
    bounds = ends[options.skip :: options.steps]
    windows = [1e3 * (b - a) / options.steps for a, b in itertools.pairwise(bounds)]
    return {
        "step_ms": statistics.median(windows),
        "spread_ms": max(windows) - min(windows),
        "loss": float(losses[0].detach()),
        "active_gib": torch.accelerator.memory_stats().get("active_bytes.all.peak", 0) / 2**30,
        "reserved_gib": torch.accelerator.max_memory_reserved() / 2**30,
    }


def row_of(arm: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Figures of one arm, or why it failed."""
    from torchtitan.distributed import cudagraph

    # Models of several arms have the same code, which is compiled for so many alone.
    torch._dynamo.reset()
    # Results of DTensor's operators would have the mesh of an arm before this one.
    _clear_sharding_prop_cache()
    found: dict[str, Any] = {}
    try:
        # torchtitan's converter sets it for the process, and so for the arms after it.
        with torch._inductor.config.patch(emulate_precision_casts=False):
            config = config_of(arm, options, folder)
            found["layers"] = layers_in_words(config.model_spec.model.layers)
            trainer = config.build()
            found |= measured(trainer, options)
        found["captured"] = sum(wrapper._graph is not None for wrapper in cudagraph._manager._wrappers)
        trainer.close()
    except Exception as error:
        return found | {"error": f"{type(error).__name__}: {error}"[:600]}
    found["tokens_per_second"] = 1e3 * options.tokens * options.sequences / found["step_ms"]
    return found


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "arms", nargs="+", help="bf16, torchao, f8sub, or one of the last two with options, f8sub:JSON"
    )
    parser.add_argument("--model", choices=FLAVORS, default="llama3")
    parser.add_argument("--flavor", help=f"torchtitan's name of the size; by default of {FLAVORS}")
    parser.add_argument("--config", help=f"torchtitan's config; by default of {CONFIGS}")
    parser.add_argument(
        "--layers",
        type=int,
        help="of the model's, with one of the dense layers before the first with experts; all by default",
    )
    parser.add_argument(
        "--experts", type=int, help="per layer, as wide and as many per token as all, which is the default"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of a sequence")
    parser.add_argument("--sequences", type=int, default=1, help="of a rank")
    parser.add_argument(
        "--experts-on", type=int, default=1, help="ranks that share the experts; not with torch 2.11"
    )
    parser.add_argument(
        "--dispatch", choices=DISPATCHES, default="standard", help="how tokens travel to experts"
    )
    parser.add_argument("--attention", choices=("flex", "flex_flash", "varlen"), default="flex")
    parser.add_argument("--loss", choices=("chunked", "whole"), default="chunked")
    parser.add_argument("--ac", choices=CHECKPOINTS, default="selective")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--skip", type=int, default=6, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=4, help="of a window")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further arm after so many")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.flavor = options.flavor or FLAVORS[options.model]
    options.config = options.config or CONFIGS[options.model]
    return options


def main() -> None:
    """Run the arms one after another."""
    from tests.cuda import titan_0_3  # noqa: F401  (what torch before 2.14 lacks is put in its place)
    from tests.integrations.torchtitan import gloo

    options, rank, local = parsed(), int(os.environ["RANK"]), os.environ["LOCAL_RANK"]
    folder = Path(tempfile.gettempdir()) / f"titan_0_3_{os.environ['MASTER_PORT']}_{rank}"
    folder.mkdir(exist_ok=True)
    if not (folder / "data").exists():
        gloo.make_assets(rank, 1, folder)
    gloo.as_rank(rank, folder)
    os.environ["LOCAL_RANK"] = local
    begin, found = time.perf_counter(), {}
    for arm in options.arms:
        if time.perf_counter() - begin > options.seconds:
            break
        found[arm] = row_of(arm, options, folder)
        gc.collect()
        torch.accelerator.empty_cache()
        if rank == 0:
            print(json.dumps({"arm": arm, **found[arm]}), flush=True)
    if rank == 0:
        bf16 = found.get("bf16", {}).get("step_ms")
        for row in found.values():
            if bf16 and "step_ms" in row:
                row["over_bf16"] = bf16 / row["step_ms"]
        Table.of("", list(found.items()), COLUMNS).show()
        if options.json is not None:
            shape = {
                name: str(value) for name, value in vars(options).items() if name not in ("json", "arms")
            }
            with options.json.open("a") as file:
                file.writelines(json.dumps({"arm": arm, **shape, **row}) + "\n" for arm, row in found.items())
    if dist.is_initialized():
        dist.destroy_process_group()
    # Of rank 0 alone: torchrun stops the other ranks as soon as one fails, and rank 0 has tables to write.
    if rank == 0 and all("error" in row for row in found.values()):
        sys.exit("no arm ran")


if __name__ == "__main__":
    main()
