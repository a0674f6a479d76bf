"""Guards of a compiled block, f8sub's beside torchao's and nn.Linear's: how many, and the CPU time that a check takes.

Seven linear layers and a norm, as a Llama block has. Nothing is run but the check of guards, which ``torch.compile``
makes before every call; it is hot in the caches, and takes several times as long where it is not.

    python scripts/bench/guards.py --json guards.json
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import f8sub
from scripts.bench.timing import cpu_in_turns, summary
from scripts.table import Table, finish, parser

WIDTH, LAYERS = 32, 7


class Chain(nn.Module):
    """A norm, and linear layers one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x


def by_torchao(model: nn.Module) -> nn.Module:
    config = Float8LinearConfig.from_recipe_name("tensorwise")
    converted: nn.Module = convert_to_float8_training(model, config=config)
    return converted


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nn.Linear": lambda model: model,
    "torchao": by_torchao,
    "f8sub": lambda model: f8sub.convert_to_float8(model, recipe="tensorwise"),
}


def guards_of(convert: Callable[[nn.Module], nn.Module]) -> tuple[int, Callable[[], bool]]:
    """How many conditions the one graph of a block has, and what checks them as before a call."""
    torch._dynamo.reset()
    model, x = convert(Chain()), torch.randn(16, WIDTH)
    model.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        model(x).sum().backward()
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(Chain.forward.__code__)
    manager: Any = entry.guard_manager
    lines = [line.partition("+- ")[2] for line in str(manager).splitlines() if "+- " in line]
    check = functools.partial(manager.check, {"self": model, "x": x})
    if not check():
        raise RuntimeError(f"the guards do not hold: {manager.check_verbose({'self': model, 'x': x})}")
    return sum("GuardManager" not in line.partition(":")[0] for line in lines), check


def time_checks(check: Callable[[], bool], calls: int) -> float:
    """Microseconds of CPU time a check."""
    start = time.process_time()
    for _ in range(calls):
        check()
    return (time.process_time() - start) / calls * 1e6


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--calls", type=int, default=500, help="a round")
    given = options.parse_args()
    torch.set_num_threads(1)
    figures = {}
    for name, convert in CONVERSIONS.items():
        # Not in turns: a reset, which the next block needs, leaves guards that fail at once.
        count, check = guards_of(convert)
        times = cpu_in_turns({name: functools.partial(time_checks, check, given.calls)}, given.rounds)
        if not check():
            raise RuntimeError(f"the guards of {name} do not hold any more")
        figures[name] = {"guards": count, **summary(times[name], "us")}
    columns = (("guards", "{guards}"), ("us a check", "{median_us:.1f}"), ("spread", "{spread_us:.1f}"))
    finish(given, figures, Table.of(f"Guards of {LAYERS} layers", figures.items(), columns))


if __name__ == "__main__":
    main()
