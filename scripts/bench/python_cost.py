"""CPU time that Python and dispatch take, f8sub's beside torchao's: of a layer, and of bringing scales up to date.

layer: one forward and backward of a 16x16 bf16 layer, f8sub and torchao tensorwise, and nn.Linear: so small that the
    matmuls cost nothing. Every call gets a fresh x and a weight that was changed in place since the last one, as in
    training, so nothing cached from an earlier step can be used.
precompute: ``precompute_scales`` and torchao's ``precompute_float8_dynamic_scale_for_fsdp`` on the same 200 weights of
    16x16, sharded by FSDP2 on two gloo ranks, in the same two processes. SGD steps before each call, outside the
    measured time.

Rounds take turns; times are of the process, not of the wall clock.

    python scripts/bench/python_cost.py layer --json python_cost.json
    python scripts/bench/python_cost.py precompute
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

import f8sub
from scripts.bench.ranks import on_ranks
from scripts.bench.timing import cpu_in_turns, summary
from scripts.table import Table, parser, write_json

SIZE = 16
DTYPE = torch.bfloat16
GROUPS, LAYERS, WORLD = 50, 4, 2


def layers() -> dict[str, nn.Linear]:
    """The same weights in each."""

    def plain() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(SIZE, SIZE, bias=False, dtype=DTYPE))

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    return {
        "nn.Linear": plain()[0],
        "f8sub": f8sub.convert_to_float8(plain(), recipe="tensorwise")[0],
        "torchao": convert_to_float8_training(plain(), config=config)[0],
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


def operands() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return tuple(torch.randn(SIZE, SIZE, dtype=DTYPE) * factor for factor in (1.0, 1.0, 1e-3))


def dispatched(layer: nn.Linear) -> int:
    x, dy, change = operands()
    call(layer, x.clone().requires_grad_(), dy, change)
    with DispatchedOps() as ops:
        layer(x.clone().requires_grad_()).backward(dy)
    return ops.count


def time_calls(layer: nn.Linear, calls: int) -> float:
    """Microseconds of CPU time a call; the fresh inputs are made beforehand."""
    x, dy, change = operands()
    inputs = [x.clone().requires_grad_() for _ in range(calls)]
    start = time.process_time()
    for fresh in inputs:
        call(layer, fresh, dy, change)
    return (time.process_time() - start) / calls * 1e6


def of_layers(rounds: int, calls: int) -> tuple[list[dict[str, list[float]]], dict[str, dict[str, Any]]]:
    """The times of this process, and the operators that each layer dispatches."""
    torch.set_num_threads(1)
    timers = {name: functools.partial(time_calls, layer, calls) for name, layer in layers().items()}
    for timer in timers.values():
        timer()
    times = cpu_in_turns(timers, rounds)
    return [times], {name: {"dispatched_ops": dispatched(layer)} for name, layer in layers().items()}


def sharded(convert: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS))) for _ in range(GROUPS))
    )
    convert(model)
    for module in (*model, model):
        fully_shard(module)
    return model


def stepped(model: nn.Module) -> Callable[[], Any]:
    """A step of an optimizer, which both libraries' scales come after."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD(model.parameters(), lr=1e-3).step


def time_precompute(
    precompute: Callable[[nn.Module], None], model: nn.Module, step: Callable[[], Any]
) -> float:
    step()
    dist.barrier()
    start = time.process_time()
    precompute(model)
    return (time.process_time() - start) * 1e6


def of_precompute_on_a_rank(rounds: int) -> dict[str, list[float]]:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    ours = sharded(lambda model: f8sub.convert_to_float8(model, recipe="tensorwise"))
    theirs = sharded(lambda model: convert_to_float8_training(model, config=config))
    timers = {
        name: functools.partial(time_precompute, precompute, model, stepped(model))
        for name, precompute, model in (
            ("f8sub", f8sub.precompute_scales, ours),
            ("torchao", precompute_float8_dynamic_scale_for_fsdp, theirs),
        )
    }
    for timer in timers.values():
        for _ in range(3):
            timer()
    return cpu_in_turns(timers, rounds)


def report(ranks: list[dict[str, list[float]]], more: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Figures of each library over all ranks, and f8sub's ratio to torchao's, round by round."""
    found: dict[str, Any] = {}
    for name in ranks[0]:
        times = [value for rank in ranks for value in rank[name]]
        found[name] = {**summary(times, "us"), "min_us": min(times), **more.get(name, {})}
    pairs = [pair for rank in ranks for pair in zip(rank["f8sub"], rank["torchao"], strict=True)]
    found["ratio_to_torchao"] = statistics.median(ours / theirs for ours, theirs in pairs)
    found["ratio_of_minima"] = found["f8sub"]["min_us"] / found["torchao"]["min_us"]
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("what", choices=("layer", "precompute"))
    options.add_argument("--rounds", type=int, help="15 of a layer, 25 of precompute")
    options.add_argument("--calls", type=int, default=150, help="of a layer, a round")
    given = options.parse_args()
    if given.what == "layer":
        ranks, more = of_layers(given.rounds or 15, given.calls)
    else:
        ranks, more = on_ranks(WORLD, of_precompute_on_a_rank, given.rounds or 25), {}
    found = report(ranks, more)
    columns = (("median", "{median_us:.1f}"), ("min", "{min_us:.1f}"), ("spread", "{spread_us:.1f}"))
    rows = [(name, found[name]) for name in ranks[0]]
    Table.of("CPU us a call", rows, (*columns, ("ops", "{dispatched_ops}"))).show()
    print(
        f"f8sub / torchao: {found['ratio_to_torchao']:.3f} (median of the rounds' ratios), "
        f"{found['ratio_of_minima']:.3f} (minima)"
    )
    if given.json:
        write_json(given.json, found)


if __name__ == "__main__":
    main()
