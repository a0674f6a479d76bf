"""bf16 and float8 all-gathers on the hosts that torchrun started this on: bytes sent, time, and the step around them.

    scripts/multihost.sh --hosts 4 --rate 200mbit recipes/launch/torchrun.sh scripts/bench_all_gather.py

The same float8 layers three times, as in "Enabling Float8 All-Gather in FSDP2" (dev-discuss.pytorch.org/t/2359): their
weights gathered as bf16; as float8, with an all-reduce of its amax on the way of each weight's all-gather; as float8,
with one all-reduce for all weights. Only what crosses the wire differs, so the losses must be the same, bitwise. The
arms take turns, step by step. Bytes are what the kernel counted at the host's interface, protocols included.
CPU and gloo.
"""

import argparse
import functools
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tables import write_json
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import f8sub

sys.path.append(str(Path(__file__).parents[1] / "recipes"))
from traffic import count_traffic

WIDTH, HIDDEN, BLOCKS, TOKENS = 512, 1408, 2, 64
BF16, SEPARATE, COMBINED = ARMS = (
    "bf16",
    "float8, separate all-reduces",
    "float8, one all-reduce",
)
Result = TypeVar("Result")
INTERFACES = Path("/sys/class/net")


class Block(nn.Module):
    """The linear layers of a Llama block, without attention's own arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both of its sums."""
        x = x + self.o(self.q(x) + self.k(x) + self.v(x))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Arm:
    """A model of one arm, sharded over all ranks, and its optimizer."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.combined = name == COMBINED
        if name == SEPARATE:
            # Conversions share nothing: each weight's has an all-reduce of its own, which its all-gather waits for
            # because nobody calls precompute_scales.
            for layer in [fqn for fqn, module in self.model.named_modules() if isinstance(module, nn.Linear)]:
                f8sub.convert_to_float8(self.model, filter_fn=lambda _, fqn, layer=layer: fqn == layer)
        else:
            f8sub.convert_to_float8(self.model, float8_all_gather=self.combined)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model:
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, x: torch.Tensor, target: torch.Tensor) -> float:
        """A training step; the loss on this rank."""
        if self.combined:
            f8sub.precompute_scales(self.model)
        loss = F.mse_loss(self.model(x).float(), target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def gather(self) -> None:
        """Every weight once. Weights that no step has changed since the last gather were cast for that."""
        for block in self.model:
            block.unshard()
            block.reshard()


def bytes_at(interface: str) -> tuple[int, int]:
    """What the interface has sent and received since it is there."""
    counters = INTERFACES / interface / "statistics"
    return int((counters / "tx_bytes").read_text()), int((counters / "rx_bytes").read_text())


def measured(work: Callable[[], Result], interface: str) -> tuple[dict, Result]:
    """Seconds until all ranks are done with ``work``, and what crossed this host's interface meanwhile."""
    dist.barrier()
    before, start = bytes_at(interface), time.perf_counter()
    result = work()
    dist.barrier()
    seconds, after = time.perf_counter() - start, bytes_at(interface)
    return {"seconds": seconds, "sent": after[0] - before[0], "received": after[1] - before[1]}, result


def taking_turns(rounds: int) -> Iterator[tuple[int, str]]:
    """Arms in rounds that begin with another one each; round 0 is to set up connections and process groups."""
    for turn in range(1 + rounds):
        for name in ARMS[turn % 3 :] + ARMS[: turn % 3]:
            yield turn, name


def measure(rounds: int, interface: str) -> dict:
    """What this rank saw: for each arm its steps, its gathers, its amax all-reduces and its losses."""
    arms = {name: Arm(name) for name in ARMS}
    found: dict = {name: {"steps": [], "gathers": [], "all_reduces": [], "losses": []} for name in ARMS}
    for turn, name in taking_turns(rounds):
        rng = torch.Generator().manual_seed(1000 * turn + dist.get_rank())
        step = functools.partial(
            arms[name].step, *(torch.randn(TOKENS, WIDTH, generator=rng) for _ in range(2))
        )
        with count_traffic() as traffic:
            figures, loss = measured(step, interface)
        found[name]["losses"].append(loss)
        if turn:
            found[name]["steps"].append(figures)
            found[name]["all_reduces"].append(traffic.amax_all_reduces)
    for turn, name in taking_turns(3 * rounds):
        figures, _ = measured(arms[name].gather, interface)
        if turn:
            found[name]["gathers"].append(figures)
    found["idle"], _ = measured(lambda: time.sleep(1), interface)
    return found


def summary(ranks: list[dict]) -> dict:
    """Of all ranks' figures, those of a host; a step is over when the last rank is done."""
    if any(rank[name]["losses"] != rank[BF16]["losses"] for rank in ranks for name in ARMS):
        raise RuntimeError(
            "the arms train different losses, so they do not differ in their all-gathers alone"
        )
    arms = {}
    for name in ARMS:
        figures: dict = {"amax_all_reduces": statistics.mean(ranks[0][name]["all_reduces"])}
        for kind in ("steps", "gathers"):
            turns = list(zip(*(rank[name][kind] for rank in ranks), strict=True))
            figures[kind] = {
                "seconds": [max(host["seconds"] for host in turn) for turn in turns],
                "sent": statistics.mean(host["sent"] for turn in turns for host in turn),
                "received": statistics.mean(host["received"] for turn in turns for host in turn),
            }
        arms[name] = figures
    idle = statistics.mean(rank["idle"]["sent"] for rank in ranks)
    weights = BLOCKS * sum(parameter.numel() for parameter in Block().parameters())
    return {"hosts": len(ranks), "weights": weights, "idle_sent_a_second": idle, "arms": arms}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6, help="steps of each arm, and a third of its gathers")
    parser.add_argument(
        "--interface", default=os.environ.get("GLOO_SOCKET_IFNAME"), help="whose bytes to count"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    arguments = parser.parse_args()
    if not arguments.interface or not (INTERFACES / arguments.interface).exists():
        parser.error(
            f"--interface {arguments.interface}: one of {[path.name for path in INTERFACES.iterdir()]}"
        )
    torch.set_num_threads(1)
    # What forgetting precompute_scales costs is what one of the arms is there to show.
    warnings.filterwarnings("ignore", "precompute_scales.model. was not called", f8sub.Float8Warning)
    dist.init_process_group("gloo")
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, measure(arguments.rounds, arguments.interface))
    if dist.get_rank() == 0:
        figures = summary(ranks)
        for name, arm in figures["arms"].items():
            print(
                f"{name}: a step {statistics.median(arm['steps']['seconds']):.3f} s, {arm['steps']['sent']:,.0f} bytes "
                f"sent, {arm['amax_all_reduces']:g} amax all-reduces; all weights gathered once "
                f"{statistics.median(arm['gathers']['seconds']):.3f} s, {arm['gathers']['sent']:,.0f} bytes sent"
            )
        if arguments.json:
            write_json(arguments.json, figures)
    dist.destroy_process_group()
    # gloo's threads outlive the group; recipes/pretrain.py says what a process risks that ends before them.
    time.sleep(0.5)


if __name__ == "__main__":
    main()
