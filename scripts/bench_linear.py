"""GPU time of Float8Linear, forward and backward: eager, compiled by Inductor, and the three GEMMs alone.

Rounds of all variants take turns, each on inputs of its own that are drawn anew and do not fit into the L2; times are
medians of CUDA events. The weight is changed in place before every call, as in training, so that it is cast every time.
What is compared with is the faster of the two bf16 layers.

    python scripts/bench_linear.py --json bench_linear.json
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import nn

import f8sub
from f8sub.kernels.gemm.select import gemm_nt

SHAPES = [(8192, 4096, 14336), (16384, 4096, 4096)]
RECIPES = ["tensorwise", "rowwise", "blockwise"]
INPUTS = 3
"""Sets of x and dy that the calls take turns with."""


def layer(recipe: str | None, fan_in: int, fan_out: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(fan_in, fan_out, bias=False, dtype=torch.bfloat16, device="cuda"))
    return (model if recipe is None else f8sub.convert_to_float8(model, recipe=recipe))[0]


def variants(recipes: Sequence[str], fan_in: int, fan_out: int) -> dict[str, Callable]:
    """Every layer as it is and compiled, and what its GEMMs take of it."""
    found: dict[str, Callable] = {}
    for recipe in (None, *recipes):
        for compiled in (False, True):
            made = layer(recipe, fan_in, fan_out)
            called = torch.compile(made, fullgraph=True) if compiled else made
            found[f"{recipe or 'bf16'} {'compiled' if compiled else 'eager'}"] = train_step(made, called)
        if recipe is not None:
            found[f"{recipe} GEMMs alone"] = gemms_of(made)
    return found


def gemms_of(made: f8sub.Float8Linear) -> Callable:
    """The three GEMMs of a layer, of operands that were cast in the first call."""
    plan, recipe = made.plan, made.plan.recipe
    operands: list = []

    def call(x: torch.Tensor, dy: torch.Tensor) -> None:
        if not operands:
            x8, w8, dy8 = (
                f8sub.quantize(tensor, recipe, operand=name)
                for tensor, name in ((x, "x"), (made.weight, "w"), (dy, "dy"))
            )
            operands.extend(
                [
                    (plan.fprop, x8.rowwise, w8.rowwise, recipe.fprop.fast_accum),
                    (plan.dgrad, dy8.rowwise, w8.columnwise, recipe.dgrad.fast_accum),
                    (plan.wgrad, dy8.columnwise, x8.columnwise, recipe.wgrad.fast_accum),
                ]
            )
        for backend, a, b, fast_accum in operands:
            gemm_nt(backend, a, b, torch.bfloat16, fast_accum)

    return call


def train_step(made: nn.Module, called: Callable) -> Callable:
    """Forward and backward after a change of the weight that multiplies it by one."""
    one = torch.ones((), dtype=torch.bfloat16, device="cuda")

    def call(x: torch.Tensor, dy: torch.Tensor) -> None:
        with torch.no_grad():
            made.weight.mul_(one)
        made.weight.grad = None
        x.grad = None
        called(x).backward(dy)

    return call


def milliseconds(
    call: Callable, inputs: Sequence[tuple[torch.Tensor, torch.Tensor]], calls: int
) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for i in range(calls):
        call(*inputs[i % len(inputs)])
        events[i + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def measure(shape: tuple[int, int, int], recipes: Sequence[str], rounds: int, calls: int) -> dict[str, dict]:
    """Variant -> median and spread in ms, and how many times as fast as bf16."""
    tokens, fan_in, fan_out = shape
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    inputs = [
        (torch.randn(tokens, fan_in, **options).requires_grad_(), torch.randn(tokens, fan_out, **options))
        for _ in range(INPUTS)
    ]
    steps = variants(recipes, fan_in, fan_out)
    for step in steps.values():
        milliseconds(step, inputs, 4)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            # The first call of a round waits for nothing that ran before it.
            times[name] += milliseconds(step, inputs, calls + 1)[1:]
    medians = {name: statistics.median(found) for name, found in times.items()}
    bf16 = min(medians["bf16 eager"], medians["bf16 compiled"])
    results = {}
    for name, found in times.items():
        quarters = statistics.quantiles(found, n=4)
        results[name] = {
            "median_ms": medians[name],
            "spread_ms": quarters[2] - quarters[0],
            "speedup": bf16 / medians[name],
        }
    return results


def show(shape: tuple[int, int, int], results: dict[str, dict]) -> None:
    print(f"\n(tokens, in, out) = {shape}")
    print(f"{'':24}{'ms':>9}{'spread':>9}{'speedup':>10}")
    for name, row in results.items():
        print(f"{name:24}{row['median_ms']:9.3f}{row['spread_ms']:9.3f}{row['speedup']:9.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=10, help="calls a round")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is no CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    figures = {}
    for shape in SHAPES:
        torch._dynamo.reset()
        figures[str(shape)] = measure(shape, arguments.recipes, arguments.rounds, arguments.calls)
        show(shape, figures[str(shape)])
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
