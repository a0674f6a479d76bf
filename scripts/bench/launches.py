"""Host time of float8 operators, without what CUDA itself takes: on any machine, by a driver that launches nothing.

What eager code calls (quantize both usages, transpose, multiply, attention in float8) and, of the same kernels, the
launch alone, by ``Launch.run`` and by Triton. In turns, in one process; the medians, with the distance of their
quartiles.

    python scripts/bench/launches.py --json launches.json
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

import f8sub
from f8sub import Operand
from f8sub.attention import cudnn
from f8sub.attention.ops import attend
from f8sub.attention.scaling import HISTORY
from f8sub.kernels import cuda, ops, quantize, scales
from f8sub.kernels.gemm import blockwise
from f8sub.kernels.gemm.tuning import Rows
from f8sub.kernels.graph_ops import direct
from f8sub.kernels.grouped import gemm
from f8sub.kernels.triton import quantize_launch, support
from f8sub.kernels.triton.launch import Launch
from scripts.bench import no_gpu
from scripts.bench.timing import cpu_in_turns, summary
from scripts.table import Table, finish, parser

RECIPES = ("tensorwise", "rowwise", "blockwise", "gridquant")
EDGE, MULTIPROCESSORS, GROUPS = 512, 132, 4
"""Of matrices so small that making room for one on the CPU costs what it does on a GPU; of an H200; of experts."""


def by_triton(launches: list[Launch]) -> None:
    """The same launches as Triton would do them by itself."""
    for each in launches:
        each.kernel[(each.programs,)](**each.taken, **each.compile_options)


def by_us(launches: list[Launch]) -> None:
    for each in launches:
        each.run()


def multiply(a: Operand, b: Operand) -> torch.Tensor:
    config = blockwise.default_config((*a.data.shape, b.data.shape[0]), MULTIPROCESSORS)
    return blockwise.multiply(a, b, torch.bfloat16, config)


def cases() -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    found: dict[str, Callable[[], object]] = {}
    x = torch.zeros(EDGE, EDGE, dtype=torch.bfloat16)
    for name in RECIPES:
        recipe = f8sub.get_recipe(name)
        formats = recipe.fprop.a, recipe.wgrad.b
        launches = quantize_launch.quantization(x, *formats).launches
        both = functools.partial(cuda.quantize, x, *formats)
        found[f"{name}: quantize x, both usages"] = both
        amax = scales.amax(x, formats[0].tile) if formats[0].tile.is_whole else None
        names = (format.name for format in formats)
        found[f"{name}: the same, as compiled code calls it"] = functools.partial(
            direct[str(ops.quantize_as_one_node)], x, amax, *names
        )
        found[f"{name}: launches alone, {len(launches)}"] = functools.partial(by_us, launches)
        found[f"{name}: the same, by Triton"] = functools.partial(by_triton, launches)
    spec = f8sub.get_recipe("blockwise").fprop
    tensorwise = cuda.quantize(x, f8sub.get_recipe("tensorwise").fprop.a, None)[0]
    a, b = (cuda.quantize(x, format, None)[0] for format in (spec.a, spec.b))
    found["derive columnwise codes, as compiled code calls it"] = functools.partial(
        direct[str(ops.derive_columnwise)], *tensorwise.tensors, x, *2 * [tensorwise.format.name]
    )
    found["transpose codes"] = functools.partial(cuda.transpose, a.data)
    found["multiply, blockwise"] = functools.partial(multiply, a, b)
    ends = torch.full((GROUPS,), EDGE // GROUPS, dtype=torch.int32).cumsum(0).int()
    rows = Rows(ends - EDGE // GROUPS, ends, ends - EDGE // GROUPS, EDGE)
    weights = Operand(
        b.data.expand(GROUPS, -1, -1).contiguous(), b.scale_inv.expand(GROUPS, -1, -1).contiguous(), b.format
    )
    found["multiply by groups, blockwise"] = functools.partial(
        gemm.triton_by_rows, a, weights, rows, torch.bfloat16, True
    )
    return found


class NoGraph:
    """A graph of cuDNN's that computes nothing."""

    build_plans = execute = staticmethod(lambda *given, **named: None)
    get_workspace_size = staticmethod(lambda: 16)


def attention_cases() -> dict[str, Callable[[], object]]:
    """Attention in float8, without what the package nvidia-cudnn-frontend and CUDA take."""
    cudnn.build = lambda *given: NoGraph()
    cudnn._handle = lambda device: None
    cudnn._compute_capability = lambda device: 90
    # A tensor of the CPU is cast as one of a GPU.
    quantize.quantize_on_cpu = lambda x, row, col, *how: cuda.quantize(x, row, col, *how)
    q, k, v, do = (torch.randn(1, 128, h, 16).bfloat16().transpose(1, 2) for h in (2, 1, 1, 2))
    state = [torch.zeros(n) for n in ((HISTORY, 4), 4, 1)]
    found: dict[str, Callable[[], object]] = {}
    for backward in ("e4m3", "bf16"):
        given = *(x.detach().requires_grad_() for x in (q, k, v)), *state, True, 0.25, "cudnn", backward

        def forward(given: tuple[Any, ...] = given) -> torch.Tensor:
            return attend(*given)

        def both(given: tuple[Any, ...] = given) -> object:
            return torch.autograd.grad(attend(*given), given[:3], do)

        found |= {
            f"attention, forward, backward {backward}": forward,
            f"attention, both, backward {backward}": both,
        }
    return found


def time_calls(run: Callable[[], object], calls: int) -> float:
    """Microseconds of CPU time a call."""
    start = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - start) / calls * 1e6


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--calls", type=int, default=200, help="a round")
    given = options.parse_args()
    torch.set_num_threads(1)
    no_gpu.install()
    support.takes = lambda x: x.numel() > 0
    support.device_of = contextlib.nullcontext
    blockwise.multiprocessors = gemm.multiprocessors = lambda _: MULTIPROCESSORS
    runs = cases() | attention_cases()
    for run in (*runs.values(), *runs.values()):  # what is launched again is kept from the second call on
        run()
    timers = {name: functools.partial(time_calls, run, given.calls) for name, run in runs.items()}
    figures = {name: summary(times, "us") for name, times in cpu_in_turns(timers, given.rounds).items()}
    columns = (("median", "{median_us:.1f}"), ("spread", "{spread_us:.1f}"))
    finish(given, figures, Table.of("Host time, us", figures.items(), columns))


if __name__ == "__main__":
    main()
