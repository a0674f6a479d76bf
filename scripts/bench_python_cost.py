"""CPU time of one forward and backward of a 16x16 bf16 layer: f8sub and torchao tensorwise, and nn.Linear.

So small that the matmuls cost nothing: what is left is Python and dispatch. Every call gets a fresh x and a
weight that was changed in place since the last one, as in training, so nothing cached from an earlier step
can be used. Rounds of the three take turns in one process; times are of the process, not of the wall clock.

    python scripts/bench_python_cost.py --json python_cost.json
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import f8sub

SIZE = 16
DTYPE = torch.bfloat16


def layers() -> dict[str, nn.Linear]:
    """The same weights in each."""

    def plain() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(SIZE, SIZE, bias=False, dtype=DTYPE))

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    return {
        "f8sub": f8sub.convert_to_float8(plain(), recipe="tensorwise")[0],
        "torchao": convert_to_float8_training(plain(), config=config)[0],
        "nn.Linear": plain()[0],
    }


def call(layer: nn.Linear, x: torch.Tensor, dy: torch.Tensor, change: torch.Tensor) -> None:
    """One training call: forward, backward, the weight stepped."""
    layer(x).backward(dy)
    with torch.no_grad():
        layer.weight.add_(change)
    layer.weight.grad = None


class DispatchedOps(TorchDispatchMode):
    """Counts every aten operator."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return tuple(torch.randn(SIZE, SIZE, dtype=DTYPE) * factor for factor in (1.0, 1.0, 1e-3))


def dispatched(layer: nn.Linear) -> int:
    x, dy, change = operands()
    call(layer, x.clone().requires_grad_(), dy, change)
    with DispatchedOps() as ops:
        layer(x.clone().requires_grad_()).backward(dy)
    return ops.count


def time_round(layer: nn.Linear, calls: int) -> float:
    """Microseconds of CPU time a call; the fresh inputs are made beforehand."""
    x, dy, change = operands()
    inputs = [x.clone().requires_grad_() for _ in range(calls)]
    start = time.process_time()
    for fresh in inputs:
        call(layer, fresh, dy, change)
    return (time.process_time() - start) / calls * 1e6


def measure(rounds: int, calls: int) -> dict[str, list[float]]:
    """Library -> microseconds of each round, round by round in turn."""
    found = layers()
    for layer in found.values():
        time_round(layer, calls)
    times: dict[str, list[float]] = {name: [] for name in found}
    gc.disable()
    try:
        for _ in range(rounds):
            for name, layer in found.items():
                times[name].append(time_round(layer, calls))
            gc.collect()
    finally:
        gc.enable()
    return times


def summary(times: Sequence[float]) -> dict[str, float]:
    quarters = statistics.quantiles(times, n=4)
    return {
        "median_us": statistics.median(times),
        "min_us": min(times),
        "spread_us": quarters[2] - quarters[0],
    }


def report(rounds: int, calls: int) -> dict:
    times = measure(rounds, calls)
    results: dict = {name: summary(values) for name, values in times.items()}
    for name, layer in layers().items():
        results[name]["dispatched_ops"] = dispatched(layer)
    pairs = zip(times["f8sub"], times["torchao"], strict=True)
    results["ratio_to_torchao"] = statistics.median(ours / theirs for ours, theirs in pairs)
    results["ratio_of_minima"] = min(times["f8sub"]) / min(times["torchao"])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=150, help="calls a round")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = report(arguments.rounds, arguments.calls)
    print(f"{'CPU us a call':14}{'median':>9}{'min':>9}{'spread':>9}{'ops':>6}")
    for name in ("nn.Linear", "f8sub", "torchao"):
        row = results[name]
        print(
            f"{name:14}{row['median_us']:9.1f}{row['min_us']:9.1f}{row['spread_us']:9.1f}{row['dispatched_ops']:6}"
        )
    print(
        f"f8sub / torchao: {results['ratio_to_torchao']:.3f} (median of the rounds' ratios), "
        f"{results['ratio_of_minima']:.3f} (minima)"
    )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
