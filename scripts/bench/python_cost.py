"""CPU time of Python and dispatch: of a layer and of bringing scales up to date, beside torchao's; of a replayed step.

layer: one forward and backward of a 16x16 bf16 layer, f8sub and torchao tensorwise, and nn.Linear: so small that the
    matmuls cost nothing. Every call gets a fresh x and a weight that was changed in place since the last one, as in
    training, so nothing cached from an earlier step can be used.
precompute: ``precompute_scales`` and torchao's ``precompute_float8_dynamic_scale_for_fsdp`` on the same 200 weights of
    16x16, sharded by FSDP2 on two gloo ranks, in the same two processes. SGD steps before each call, outside the
    measured time.
replay: a call of ``graph_step`` whose graph is replayed, without the replay: a Llama of 32 layers, sharded by FSDP2 on
    one gloo rank, in bf16 and converted, with torch's fused AdamW and with ``fuse_step``. Graphs are those of
    tests/graphs/tape.py. Alone, each part finds its objects in caches; the call of all parts finds fewer there.

Rounds take turns; times are of the process, not of the wall clock.

    python scripts/bench/python_cost.py layer --json python_cost.json
    python scripts/bench/python_cost.py precompute
    python scripts/bench/python_cost.py replay
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

import f8sub
from f8sub.integrations.transformers import attend_causally
from scripts.bench.ranks import on_ranks, process_group
from scripts.bench.timing import cpu_in_turns, summary
from scripts.table import Table, finish, parser, write_json

SIZE = 16
DTYPE = torch.bfloat16
GROUPS, LAYERS, WORLD = 50, 4, 2
REPLAYED = ("bf16", "bf16+fused", "f8sub", "f8sub+fused")
PARTS = (
    ("call", "{call_median_us:.0f} ± {call_spread_us:.0f}"),
    ("compared", "{compared_median_us:.0f}"),
    ("before and after", "{before_and_after_median_us:.0f}"),
    ("call over bf16's", "{over_bf16:.2f}"),
)


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


class Replayed:
    """A model whose replayed steps run nothing but what the host does around a replay."""

    def __init__(self, arm: str, layers: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        library, _, fused = arm.partition("+")
        shape = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": layers}
        model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2))
        attend_causally(model)
        if library == "f8sub":
            f8sub.convert_to_float8(model, recipe="tensorwise", min_dim=1)
        for part in (*model.model.layers, model):
            fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=DTYPE, reduce_dtype=torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        step = f8sub.optim.fuse_step(optimizer) if fused else None

        def forward_backward(tokens: torch.Tensor) -> torch.Tensor:
            logits = model(tokens[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            if step is not None:
                step.clip_grad_norm_(1.0)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return loss

        self._tokens = torch.randint(64, (1, 5))
        self._step = f8sub.graph_step(forward_backward, model, optimizer)
        for _ in range(5):
            self._step(self._tokens)
        if self._step.how != "replayed" or (step is not None and step.why_torch is not None):
            raise RuntimeError(
                f"{arm}: {self._step.how}, {self._step.why_launched}, {step and step.why_torch}"
            )
        self._graph = next(iter(self._step._graphs.values()))

    def parts(self) -> dict[str, Callable[[], Any]]:
        """The whole call, what it compares, and what it does before and after the replay."""
        host = self._graph.host
        return {
            "call": lambda: self._step(self._tokens),
            "compared": self._graph.dependencies.difference,
            "before_and_after": lambda: (host.prepare(), host.replayed()),
        }


def imitate_graphs(patch: pytest.MonkeyPatch) -> None:
    """Have steps captured, and their kernels and replays, but for the first one, do nothing."""
    from f8sub.graphs import graph_step
    from f8sub.kernels.triton import adamw_launch
    from tests.graphs import tape

    class Once(tape.Tape):
        """Writes what the host reads."""

        def replay(self) -> None:
            super().replay()
            self.replay = lambda: None

    tape.imitate(patch)
    patch.setattr(graph_step, "Recorded", Once)
    patch.setattr(adamw_launch, "why_not_of", lambda values: None)
    patch.setattr(adamw_launch, "step", lambda *given: None)
    patch.setattr(adamw_launch, "sum_of_squares", lambda values: torch.ones((), dtype=torch.float64))


def time_part(run: Callable[[], Any], calls: int) -> float:
    """Microseconds of CPU time a call."""
    start = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - start) / calls * 1e6


def of_replays(layers: int, rounds: int, calls: int) -> dict[str, dict[str, Any]]:
    """Figures of each arm, and of its whole call over bf16's."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {arm: {} for arm in REPLAYED}
    with pytest.MonkeyPatch.context() as patch, process_group(torch.device("cpu")):
        imitate_graphs(patch)
        timers = {
            (arm, part): functools.partial(time_part, run, calls)
            for arm in REPLAYED
            for part, run in Replayed(arm, layers).parts().items()
        }
        for (arm, part), times in cpu_in_turns(timers, rounds).items():
            found[arm] |= {f"{part}_{name}": value for name, value in summary(times, "us").items()}
    for arm in REPLAYED:
        found[arm]["over_bf16"] = found[arm]["call_median_us"] / found["bf16"]["call_median_us"]
    return found


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
    options.add_argument("what", choices=("layer", "precompute", "replay"))
    options.add_argument("--rounds", type=int, help="15 of a layer or a replay, 25 of precompute")
    options.add_argument("--calls", type=int, default=150, help="of a layer or a replay, a round")
    options.add_argument("--layers", type=int, default=32, help="of the model that is replayed")
    given = options.parse_args()
    if given.what == "replay":
        arms = of_replays(given.layers, given.rounds or 15, given.calls)
        finish(given, arms, Table.of("CPU us a replayed step", arms.items(), PARTS))
        return
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
