"""Hosts for tests: ``scripts/multihost.sh``, and whether this machine lets it make them."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PYTHONPATH, ROOT

MULTIHOST = ROOT / "scripts" / "multihost.sh"
_PROBE = """
    set -e
    name=f8sub-probe-$$
    ip netns add $name
    trap 'ip netns delete $name' EXIT
    ip -n $name link add bridge type bridge
    ip -n $name link add port type veth peer name eth0
    tc -n $name qdisc add dev port root tbf rate 1gbit burst 256kb latency 1ms
    unshare --uts true
"""


needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["bash", "-c", _PROBE], capture_output=True).returncode != 0,
    reason="network namespaces are not for everybody: root, with ip, tc and unshare",
)


def environment(**more: str) -> dict[str, str]:
    """What a process on a host needs to run Python programs of this repository."""
    path = os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    return {"PATH": path, "PYTHON": sys.executable, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"} | more


def start(*arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
    """``multihost.sh`` with these arguments, its output and its errors in pipes."""
    return subprocess.Popen(
        [MULTIHOST, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**variables),
        cwd=ROOT,
    )


def processes_on(host: int, run: subprocess.Popen[str]) -> dict[int, list[str]]:
    """Command lines of what runs on a host, by process."""
    command = ["ip", "netns", "pids", f"f8sub-{run.pid}-host{host}"]
    listed = subprocess.run(command, capture_output=True, text=True)
    found = {}
    for pid in map(int, listed.stdout.split()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return found


def left_behind(run: subprocess.Popen[str]) -> list[str]:
    """Namespaces that a run has made and not deleted."""
    return [path.name for path in Path("/run/netns").glob(f"f8sub-{run.pid}-*")]
