"""Host time of float8 operators, without what CUDA itself takes: on any machine, by a driver that launches nothing.

What eager code calls (quantize both usages, transpose, multiply) and, of the same kernels, the launch alone, by
``Launch.run`` and by Triton. In turns, in one process; the medians, with the distance of their quartiles.

    python scripts/bench_launches.py --json launches.json
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import no_gpu
import torch
from tables import Table, parser, write_json

import f8sub
from f8sub.formats import Operand
from f8sub.kernels.triton import gemm_launch, launch, quantize_cuda, support, triton_mm

if TYPE_CHECKING:
    from f8sub.kernels.triton.launcher import Launch

RECIPES = ("tensorwise", "rowwise", "blockwise", "gridquant")
EDGE, MULTIPROCESSORS = 512, 132
"""Of matrices so small that making room for one on the CPU costs what it does on a GPU; of an H200."""

ROUNDS, CALLS = 15, 200
Run = Callable[[], object]


def by_triton(launches: list[Launch]) -> Run:
    """The same launches as Triton would do them by itself."""

    def run() -> None:
        for each in launches:
            each.kernel[(each.programs,)](**each.taken, **each.options)

    return run


def by_us(launches: list[Launch]) -> Run:
    def run() -> None:
        for each in launches:
            each.run()

    return run


def cases() -> dict[str, Run]:
    """What is timed, by name."""
    found: dict[str, Run] = {}
    x = torch.zeros(EDGE, EDGE, dtype=torch.bfloat16)
    for name in RECIPES:
        recipe = f8sub.get_recipe(name)
        formats = recipe.fprop.a, recipe.wgrad.b
        launches = launch.quantization(x, *formats).launches
        found[f"{name}: quantize x, both usages"] = lambda formats=formats: quantize_cuda.quantize(
            x, *formats
        )
        found[f"{name}: launches alone, {len(launches)}"] = by_us(launches)
        found[f"{name}: the same, by Triton"] = by_triton(launches)
    spec = f8sub.get_recipe("blockwise").fprop
    a, b = (quantize_cuda.quantize(x, format, None)[0] for format in (spec.a, spec.b))
    found["transpose codes"] = lambda: quantize_cuda.transpose(a.data)
    found["multiply, blockwise"] = lambda: multiply(a, b)
    return found


def multiply(a: Operand, b: Operand) -> None:
    shape = (*a.data.shape, b.data.shape[0])
    config = triton_mm.default_config(shape, MULTIPROCESSORS)
    launches, _ = gemm_launch.multiplication(a, b, torch.bfloat16, config, MULTIPROCESSORS)
    for each in launches:
        each.run()


def measure(rounds: int, calls: int) -> dict[str, list[float]]:
    """Microseconds of a call, round by round."""
    runs = cases()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in runs.items():
                start = time.process_time()
                for _ in range(calls):
                    run()
                times[name].append((time.process_time() - start) / calls * 1e6)
            gc.collect()
    finally:
        gc.enable()
    return times


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=ROUNDS)
    arguments.add_argument("--calls", type=int, default=CALLS, help="a round")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    no_gpu.install()
    support.takes = lambda x: x.numel() > 0
    support.device_of = contextlib.nullcontext
    times = measure(given.rounds, given.calls)
    figures = {}
    for name, found in times.items():
        low, median, high = statistics.quantiles(found, n=4)
        figures[name] = {"median_us": median, "spread_us": high - low}
    lines = [[name, f"{row['median_us']:.1f}", f"{row['spread_us']:.1f}"] for name, row in figures.items()]
    Table("Host time, us", ("", "median", "spread"), lines).show()
    if given.json:
        write_json(given.json, figures)


if __name__ == "__main__":
    main()
