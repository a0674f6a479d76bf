"""What float8 all-gathers save between hosts: bytes on the wire, all-gather time and step time, as shares of bf16's.

The same float8 layers three times, as in "Enabling Float8 All-Gather in FSDP2" (dev-discuss.pytorch.org/t/2359): their
weights gathered as bf16; as float8, with an all-reduce of its amax on the way of each weight's all-gather; as float8,
with one all-reduce for all weights. Only what crosses the wire differs, so the losses must be the same, bitwise. The
arms take turns, step by step. Bytes are what the kernel counted at the host's interface, protocols included. CPU and
gloo.

On the hosts that ``multihost.sh`` makes of this machine, one rank each: 2 and 4 of them, with links that nothing limits
and with links of 200 Mbit/s. Times are medians of the turns' ratios, their quartiles beside them. Needs root and Linux;
as root, about five minutes:

    python scripts/tables/hosts.py --write-docs

Under torchrun it measures the hosts that torchrun started it on:

    scripts/multihost.sh --hosts 4 --rate 200mbit recipes/launch/torchrun.sh scripts/tables/hosts.py
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import f8sub
from scripts.table import ROOT, Table, finish, parser

sys.path.insert(0, str(ROOT / "recipes"))
from f8sub_pretrain.traffic import count_traffic

WIDTH, HIDDEN, BLOCKS, TOKENS = 512, 1408, 2, 64
BF16, SEPARATE, COMBINED = ARMS = ("bf16", "float8, separate all-reduces", "float8, one all-reduce")
UNLIMITED = "unlimited"
COLUMNS = (
    "hosts, link",
    "weights gathered as",
    "amax all-reduces per step",
    "bytes sent, all-gather",
    "bytes sent, step",
    "time, all-gather",
    "time, step",
)
INTERFACES = Path("/sys/class/net")
Result = TypeVar("Result")


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
        for module in (*self.model, self.model):
            fully_shard(module, mp_policy=policy)
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


def measured(work: Callable[[], Result], interface: str) -> tuple[dict[str, float], Result]:
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


def measure(rounds: int, interface: str) -> dict[str, Any]:
    """What this rank saw: for each arm its steps, its gathers, its amax all-reduces and its losses."""
    arms = {name: Arm(name) for name in ARMS}
    found: dict = {name: {"steps": [], "gathers": [], "all_reduces": [], "losses": []} for name in ARMS}
    for turn, name in taking_turns(rounds):
        rng = torch.Generator().manual_seed(1000 * turn + dist.get_rank())
        batch = (torch.randn(TOKENS, WIDTH, generator=rng) for _ in range(2))
        with count_traffic() as traffic:
            figures, loss = measured(functools.partial(arms[name].step, *batch), interface)
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


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
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
            hosts = [host for turn in turns for host in turn]
            figures[kind] = {
                "seconds": [max(host["seconds"] for host in turn) for turn in turns],
                **{way: statistics.mean(host[way] for host in hosts) for way in ("sent", "received")},
            }
        arms[name] = figures
    idle = statistics.mean(rank["idle"]["sent"] for rank in ranks)
    weights = BLOCKS * sum(parameter.numel() for parameter in Block().parameters())
    return {"hosts": len(ranks), "weights": weights, "idle_sent_a_second": idle, "arms": arms}


def run_rank(arguments: argparse.Namespace) -> None:
    """Measure with the other ranks; the first one tells."""
    torch.set_num_threads(1)
    # What forgetting precompute_scales costs is what one of the arms is there to show.
    warnings.filterwarnings("ignore", "precompute_scales.model. was not called", f8sub.Float8Warning)
    dist.init_process_group("gloo")
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, measure(arguments.rounds, arguments.interface))
    if dist.get_rank() == 0:
        figures = summary(ranks)
        finish(arguments, figures, table(rows(figures, f"{arguments.interface}")))
    dist.destroy_process_group()
    # gloo's threads outlive the group; recipes/pretrain.py says what a process risks that ends before them.
    time.sleep(0.5)


def run(hosts: int, rate: str, rounds: int) -> dict[str, Any]:
    """The figures of one setting."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        limit = [] if rate == UNLIMITED else ["--rate", rate]
        command = [ROOT / "scripts" / "multihost.sh", "--hosts", str(hosts), *limit, "--timeout", "600"]
        command += [ROOT / "recipes" / "launch" / "torchrun.sh", __file__]
        command += ["--rounds", str(rounds), "--json", figures]
        environment = os.environ | {"PYTHON": sys.executable, "NPROC_PER_NODE": "1"}
        finished = subprocess.run(command, capture_output=True, text=True, env=environment)
        if finished.returncode:
            raise RuntimeError(
                f"{hosts} hosts, {rate}: status {finished.returncode}\n{finished.stdout}{finished.stderr}"
            )
        return json.loads(figures.read_text())


def ratios(figures: dict[str, Any], arm: str, kind: str) -> list[float]:
    """What an arm took of bf16's time, turn by turn."""
    pairs = zip(figures["arms"][arm][kind]["seconds"], figures["arms"][BF16][kind]["seconds"], strict=True)
    return [seconds / base for seconds, base in pairs]


def with_quartiles(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}"
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def rows(figures: dict[str, Any], rate: str) -> list[list[str]]:
    base = figures["arms"][BF16]
    made = [
        [f"{figures['hosts']}, {rate}", BF16, f"{base['amax_all_reduces']:g}"]
        + [f"{base[kind]['sent'] / 1e6:.1f} MB" for kind in ("gathers", "steps")]
        + [f"{statistics.median(base[kind]['seconds']):.2f} s" for kind in ("gathers", "steps")]
    ]
    for name in ARMS[1:]:
        arm = figures["arms"][name]
        made.append(
            ["", name, f"{arm['amax_all_reduces']:g}"]
            + [f"{arm[kind]['sent'] / base[kind]['sent']:.2f}" for kind in ("gathers", "steps")]
            + [with_quartiles(ratios(figures, name, kind)) for kind in ("gathers", "steps")]
        )
    return made


def table(lines: list[list[str]]) -> Table:
    return Table("Of one host; float8's as shares of bf16's", COLUMNS, lines)


def main() -> None:
    made = parser(__doc__, "hosts_table")
    made.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    made.add_argument("--rates", nargs="+", default=[UNLIMITED, "200mbit"])
    made.add_argument("--rounds", type=int, default=6, help="steps of each arm, and a third of its gathers")
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    made.add_argument("--interface", default=interface, help="whose bytes to count, under torchrun")
    given = made.parse_args()
    if "RANK" in os.environ:
        if not given.interface or not (INTERFACES / given.interface).exists():
            there = [path.name for path in INTERFACES.iterdir()]
            made.error(f"--interface {given.interface}: one of {there}")
        run_rank(given)
        return
    settings = [(hosts, rate) for hosts in given.hosts for rate in given.rates]
    results = {f"{hosts} hosts, {rate}": run(hosts, rate, given.rounds) for hosts, rate in settings}
    pairs = zip(settings, results.values(), strict=True)
    finish(given, results, table([row for (_, rate), figures in pairs for row in rows(figures, rate)]))


if __name__ == "__main__":
    main()
