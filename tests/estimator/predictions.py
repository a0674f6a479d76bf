"""What the estimate says of each figure of measured.toml: a prediction beside every measurement."""

import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import f8sub
from f8sub import GemmSpec, Recipe
from f8sub.convert.products import Product, Shapes
from f8sub.estimator import bytes, gpus, seconds
from f8sub.estimator.cluster import FLOAT32, Arm, Cluster, blocks_seconds, step_of
from f8sub.estimator.estimate import shapes_of
from f8sub.estimator.seconds import Run, by_expert_seconds, over_tokens_seconds

DATA = tomllib.loads((Path(__file__).parent / "measured.toml").read_text())
ASKED = {"recipe", "reduction", "gemm", "sizes", "compiled", "kernels", "checkpoint", "miss"}
SMALL_RECIPES = ("tensorwise", "rowwise", "blockwise", "gridquant")
LARGE = [(8192, 8192, 8192), (8192, 4096, 14336), (8192, 14336, 4096), (14336, 8192, 4096)]
BYTES_OF_VOCABULARY = 272
"""257 tokens of ``recipes/pretrain.py``'s default, in whole 16s."""

NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
SIZES = {
    "8b": dict(zip(NAMES, (4096, 14336, 32, 8, 128256), strict=True)),
    "1b": dict(zip(NAMES, (2048, 8192, 32, 8, BYTES_OF_VOCABULARY), strict=True)),
    "30b-a3b": dict(zip(NAMES, (2048, 6144, 32, 4, BYTES_OF_VOCABULARY), strict=True))
    | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128},
}


@functools.cache
def model(size: str, layers: int) -> Shapes:
    transformers = pytest.importorskip("transformers")
    kind = "Qwen3Moe" if "num_experts" in SIZES[size] else "Llama"
    config = getattr(transformers, f"{kind}Config")(**SIZES[size], num_hidden_layers=layers)
    with torch.device("meta"):
        return shapes_of(getattr(transformers, f"{kind}ForCausalLM")(config))


def recipe_of(name: str) -> Recipe | None:
    return None if name == "bf16" else f8sub.get_recipe(name)


def run_of(group: dict[str, Any], row: dict[str, Any]) -> Run:
    return Run(
        tokens=group.get("tokens", 8192),
        sequence=group.get("sequence", 8192),
        shards=group.get("shards", 1),
        checkpoint=row.get("checkpoint", group.get("checkpoint", "none")),
        compiled=row.get("compiled", group["kind"] not in ("small", "small beside")),
        sharded=group.get("sharded", group["kind"] in ("blocks", "step", "reductions", "graph")),
        kernels=row.get("kernels", False),
        clipped=group.get("clipped", False),
    )


def layer(n: int, k: int, reads: str = "x") -> Product:
    return Product("x", n, k, 1, n * k, None, reads, False, None)


def alone(product: Product, recipe: Recipe | None, run: Run, gpu: gpus.Gpu = gpus.H200) -> float:
    return seconds.linear_seconds(product, recipe, gpu, run, gathered=False).total


def gpu_of(group: dict[str, Any]) -> gpus.Gpu:
    return gpus.gpu_of(group.get("gpu", "H200"))


def cluster_of(gpu: gpus.Gpu, run: Run) -> Cluster:
    return Cluster(gpu, run.shards * run.replicas, replicas=run.replicas)


def blocks(shapes: Shapes, recipe: Recipe | None, gpu: gpus.Gpu, run: Run) -> float:
    return blocks_seconds(shapes, Arm(recipe), cluster_of(gpu, run), run)


def step(shapes: Shapes, recipe: Recipe | None, gpu: gpus.Gpu, run: Run) -> float:
    return step_of(shapes, Arm(recipe), cluster_of(gpu, run), run).launched


def blocks_memory(shapes: Shapes, recipe: Recipe | None, run: Run) -> float:
    """Of forward and backward of the blocks alone, the whole model's weights being there, without optimizer."""
    weights = shapes.parameters / run.shards * run.master_bytes
    each = list(shapes.blocks.values())
    saved = sum(bytes.saved_bytes(block, recipe, run) for block in each)
    gradients = sum(product.elements for block in each for product in block) / run.shards * run.master_bytes
    gathered = 2 * max(sum(bytes.gathered_bytes(product, recipe) for product in block) for block in each)
    at_end = gradients + max(bytes.in_backward_bytes(block, recipe, run) for block in each)
    at_begin = bytes.kept_codes(shapes, recipe, run) + saved + gathered
    return weights + max(at_begin, at_end) + bytes.WORKSPACE


def of_a_run(group: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    """Of blocks or whole steps."""
    shapes, run = model(group.get("size", "8b"), group["layers"]), run_of(group, row)
    recipe = recipe_of(row["recipe"])
    of_blocks = group["kind"] == "blocks"
    timed = blocks if of_blocks else step
    gpu = gpu_of(group)
    time, plain = timed(shapes, recipe, gpu, run), timed(shapes, None, gpu, replace(run, compiled=True))
    held = blocks_memory(shapes, recipe, run) if of_blocks else bytes.memory(shapes, recipe, run).total
    whole = sum(product.elements for product in shapes.products) + shapes.other_parameters
    return {
        "ms": time * 1e3,
        "over_bf16": plain / time,
        "tokens_per_s": group.get("gpus", 1) * run.tokens / time,
        "gb": held / 1e9,
        "gib": held / 2**30,
        "reduce_ms": whole * 4 / run.shards / gpus.H200.link * 1e3,
        "copy_in_ms": whole * seconds.COPY_IN / gpus.H200.copy * 1e3,
    }


def of_a_graph(group: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    """Of whole steps, replayed and launched."""
    shapes, run = model(group.get("size", "8b"), group["layers"]), run_of(group, row)
    cluster, own = cluster_of(gpu_of(group), run), recipe_of(row["recipe"])
    arm = Arm(own, reduction=row.get("reduction", FLOAT32))
    time, plain = (step_of(shapes, each, cluster, run) for each in (arm, Arm()))
    return {
        "ms": time.replayed * 1e3,
        "over_bf16": plain.replayed / time.replayed,
        "launched_ms": time.launched * 1e3,
        "launched_over_bf16": plain.launched / time.launched,
    }


def of_a_layer(group: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    run, product = run_of(group, row), layer(14336, 4096)
    time = alone(product, recipe_of(row["recipe"]), run)
    return {"ms": time * 1e3, "over_bf16": alone(product, None, run) / time}


def of_products(group: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    recipe = recipe_of(row["recipe"])
    spec = GemmSpec(a=None, b=None) if recipe is None else getattr(recipe, row["gemm"])
    shapes = LARGE if group["kind"] == "product" else [(64, 8192, 8192)]
    rates = [2e-12 * m * k * n / seconds.gemm_seconds(spec, m, k, n, gpus.H200) for m, k, n in shapes]
    return {"slowest": min(rates), "fastest": max(rates), "tflops": rates[0]}


def of_small_layers(group: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    run, found = run_of(group, row), []
    for size in row["sizes"]:
        for recipe in map(f8sub.get_recipe, SMALL_RECIPES):
            if group["kind"] == "small":
                layers = [layer(size, 4096), layer(4096, size)]
                found += [alone(each, None, run) / alone(each, recipe, run) for each in layers]
            else:
                first, second = alone(layer(4096, 4096), recipe, run), layer(size, 4096, reads="y")
                found.append((first + alone(second, None, run)) / (first + alone(second, recipe, run)))
    return {"slowest": min(found), "fastest": max(found)}


def of_grouped_products(group: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    experts, n, k, tokens = row["sizes"]
    recipe, gpu = recipe_of(row["recipe"]), gpu_of(group)
    spec = GemmSpec(a=None, b=None) if recipe is None else getattr(recipe, row["gemm"])
    if row["gemm"] == "wgrad":
        time = over_tokens_seconds(spec, tokens, n, k, experts, gpu)
    else:
        depth, width = (k, n) if row["gemm"] == "fprop" else (n, k)
        time = by_expert_seconds(spec, tokens, depth, width, experts, gpu)
    return {"tflops": 2e-12 * tokens * n * k / time}


def of_experts(group: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    """Products and casts; 28 bytes an element of SwiGLU, and 6 where the gradients of gate's and up's x are added."""
    experts, n, k, tokens = row["sizes"]
    sizes = {"up": (n, k, "gate"), "gate": (n, k, "gate"), "down": (k, n, "down")}
    weights = [
        Product(name, rows, cols, 1, experts * n * k, None, reads, False, None, experts=experts)
        for name, (rows, cols, reads) in sizes.items()
    ]
    run, gpu = Run(tokens, checkpoint="none"), gpu_of(group)
    rest = tokens * (28 * n + 6 * k) / gpu.copy
    time, plain = (
        rest + sum(alone(w, r, run, gpu) for w in weights) for r in (recipe_of(row["recipe"]), None)
    )
    return {"ms": time * 1e3, "over_bf16": plain / time}


PREDICT = {
    "layer": of_a_layer,
    "blocks": of_a_run,
    "step": of_a_run,
    "reductions": of_a_run,
    "graph": of_a_graph,
    "product of experts": of_grouped_products,
    "experts": of_experts,
    "product": of_products,
    "few rows": of_products,
    "small": of_small_layers,
    "small beside": of_small_layers,
}


@dataclass(frozen=True, eq=False)
class Figure:
    """One measured figure; ``miss`` is why the estimate does not hit it, None where it should."""

    group: dict[str, Any]
    row: dict[str, Any]
    what: str

    @property
    def measured(self) -> float:
        return self.row[self.what]

    @property
    def miss(self) -> str | None:
        return self.row.get("miss", {}).get(self.what)

    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return PREDICT[self.group["kind"]](self.group, self.row)[self.what] / self.measured - 1


def figures() -> Iterator[Figure]:
    for group in DATA["set"]:
        for row in group["rows"]:
            yield from (Figure(group, row, what) for what in row if what not in ASKED)
