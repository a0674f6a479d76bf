"""CPU time of bringing the scales of 200 float8 weights up to date, after a step, on two gloo ranks.

f8sub's ``precompute_scales`` and torchao's ``precompute_float8_dynamic_scale_for_fsdp`` on the same 16x16
weights, sharded by FSDP2, in turn in the same two processes. Every weight is changed in place before each
call, outside the measured time. Times are of the process, not of the wall clock.

    python scripts/bench_precompute.py --json precompute.json
"""

import argparse
import datetime
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

import f8sub

SIZE, GROUPS, LAYERS = 16, 50, 4
WORLD = 2


def sharded(convert: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS))) for _ in range(GROUPS))
    )
    convert(model)
    for group in model:
        fully_shard(group)
    return fully_shard(model)


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(1e-3)


def microseconds(precompute: Callable[[nn.Module], None], model: nn.Module) -> float:
    change(model)
    dist.barrier()
    start = time.process_time()
    precompute(model)
    return (time.process_time() - start) * 1e6


def measure(rank: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=120),
    )
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    cases = {
        "f8sub": (
            f8sub.precompute_scales,
            sharded(lambda model: f8sub.convert_to_float8(model, recipe="tensorwise")),
        ),
        "torchao": (
            precompute_float8_dynamic_scale_for_fsdp,
            sharded(lambda model: convert_to_float8_training(model, config=config)),
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for precompute, model in cases.values():
        for _ in range(3):
            microseconds(precompute, model)
    gc.disable()
    for _ in range(rounds):
        for name, (precompute, model) in cases.items():
            times[name].append(microseconds(precompute, model))
        gc.collect()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def report(rounds: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(rounds, folder), nprocs=WORLD)
        ranks = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(WORLD)]
    results: dict = {}
    for name in ("f8sub", "torchao"):
        times = [time for rank in ranks for time in rank[name]]
        quarters = statistics.quantiles(times, n=4)
        results[name] = {
            "median_us": statistics.median(times),
            "min_us": min(times),
            "spread_us": quarters[2] - quarters[0],
        }
    results["ratio_to_torchao"] = statistics.median(
        ours / theirs for rank in ranks for ours, theirs in zip(rank["f8sub"], rank["torchao"], strict=True)
    )
    results["ratio_of_minima"] = results["f8sub"]["min_us"] / results["torchao"]["min_us"]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    arguments = parser.parse_args()
    results = report(arguments.rounds)
    print(f"{'CPU us a call':14}{'median':>9}{'min':>9}{'spread':>9}")
    for name in ("f8sub", "torchao"):
        row = results[name]
        print(f"{name:14}{row['median_us']:9.0f}{row['min_us']:9.0f}{row['spread_us']:9.0f}")
    print(
        f"f8sub / torchao: {results['ratio_to_torchao']:.3f} (median of the rounds' ratios), "
        f"{results['ratio_of_minima']:.3f} (minima)"
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
