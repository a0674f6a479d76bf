"""What float8 all-gathers save between hosts: bytes on the wire, all-gather time and step time, as shares of bf16's.

``bench_all_gather.py`` on the hosts that ``multihost.sh`` makes of this machine, one rank each: 2 and 4 of them, with
links that nothing limits and with links of 200 Mbit/s. Times are medians of the turns' ratios, their quartiles beside
them. Needs root and Linux; as root, about five minutes:

    python scripts/hosts_table.py --write-readme
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench_all_gather import ARMS, BF16
from tables import Table, parser, write_between_markers, write_json

SCRIPTS = Path(__file__).parent
UNLIMITED = "unlimited"
COLUMNS = (
    "hosts, link",
    "weights gathered as",
    "amax all-reduces a step",
    "bytes sent, all-gather",
    "bytes sent, step",
    "time, all-gather",
    "time, step",
)


def run(hosts: int, rate: str, rounds: int) -> dict:
    """The figures of one setting.

    Raises:
        RuntimeError: it failed; with what it wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        limit = [] if rate == UNLIMITED else ["--rate", rate]
        command = [SCRIPTS / "multihost.sh", "--hosts", str(hosts), *limit, "--timeout", "600"]
        command += [SCRIPTS.parent / "recipes" / "launch" / "torchrun.sh", SCRIPTS / "bench_all_gather.py"]
        command += ["--rounds", str(rounds), "--json", figures]
        environment = os.environ | {"PYTHON": sys.executable, "NPROC_PER_NODE": "1"}
        finished = subprocess.run(command, capture_output=True, text=True, env=environment)
        if finished.returncode:
            raise RuntimeError(
                f"{hosts} hosts, {rate}: status {finished.returncode}\n{finished.stdout}{finished.stderr}"
            )
        return json.loads(figures.read_text())


def ratios(figures: dict, arm: str, kind: str) -> list[float]:
    """What an arm took of bf16's time, turn by turn."""
    pairs = zip(figures["arms"][arm][kind]["seconds"], figures["arms"][BF16][kind]["seconds"], strict=True)
    return [seconds / base for seconds, base in pairs]


def with_quartiles(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}"
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def rows(figures: dict, rate: str) -> list[list[str]]:
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


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--rates", nargs="+", default=[UNLIMITED, "200mbit"])
    arguments.add_argument("--rounds", type=int, default=6)
    given = arguments.parse_args()
    settings = [(hosts, rate) for hosts in given.hosts for rate in given.rates]
    results = {f"{hosts} hosts, {rate}": run(hosts, rate, given.rounds) for hosts, rate in settings}
    lines = [
        row
        for (_, rate), figures in zip(settings, results.values(), strict=True)
        for row in rows(figures, rate)
    ]
    made = Table("Of one host; float8's as shares of bf16's", COLUMNS, lines)
    made.show()
    if given.json:
        write_json(given.json, results)
    if given.write_readme:
        write_between_markers("hosts_table", made.markdown())


if __name__ == "__main__":
    main()
