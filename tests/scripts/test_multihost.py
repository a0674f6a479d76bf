"""Hosts on one machine: their network, its limits and counters, and that nothing of it stays behind."""

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.namespaces import left_behind, needs_hosts, start

PAYLOAD = 1_500_000
SEND = f"""
import os, socket, time
if os.environ["NODE_RANK"] == "0":
    connection, address = socket.create_server(("host0", 29500)).accept()
    print(len(connection.makefile("rb").read()), "bytes from", address[0])
else:
    sending = socket.socket()
    while sending.connect_ex(("host0", 29500)):
        time.sleep(0.02)
    sending.sendall(bytes({PAYLOAD}))
"""


@needs_hosts
def test_hosts_reach_each_other_and_the_kernel_counts_what_they_send():
    """Host 1 sends the payload to host 0."""
    run = start("--hosts", "2", sys.executable, "-c", SEND)
    output, errors = run.communicate(timeout=600)
    assert run.returncode == 0, errors
    assert f"host0  {PAYLOAD} bytes from 10.77.0.2" in output
    assert left_behind(run) == []
    counted = re.findall(r"(host\d+)  eth0 sent (\d+) bytes, received (\d+) bytes", errors)
    counters = {host: (int(out), int(into)) for host, out, into in counted}
    assert counters.keys() == {"host0", "host1"}
    sent_by_1, received_by_0 = counters["host1"][0], counters["host0"][1]
    # Headers are 5 % of full frames at most; a busy machine sends small ones too, and some again.
    assert PAYLOAD < sent_by_1 < 1.25 * PAYLOAD
    assert abs(received_by_0 - sent_by_1) < 0.01 * PAYLOAD
    for count in (counters["host0"][0], counters["host1"][1]):
        assert 0 < count < 0.1 * PAYLOAD


@needs_hosts
def test_a_host_that_fails_ends_the_others_and_leaves_nothing():
    failing = "[ $NODE_RANK != 1 ] || { echo out of luck; exit 7; }; sleep 3600"
    run = start("--hosts", "3", "bash", "-c", failing)
    output, errors = run.communicate(timeout=600)
    assert run.returncode == 7
    assert "host1 ended with status 7" in errors
    assert "host1  out of luck" in output
    assert left_behind(run) == []


def processes_with(words: list[str]) -> list[int]:
    """Processes with this command line."""
    wanted = "\0".join([*words, ""]).encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [int(path.parent.name)] if path.read_bytes() == wanted else []
    return found


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_hosts_processes_and_leaves_nothing(number):
    sleep = ["sleep", f"3600.{os.getpid()}{number:d}"]
    # What a shell starts in the background ignores SIGINT, and so would all that these tests start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run = start("--hosts", "2", "bash", "-c", f"trap 'echo goodbye; exit' TERM; {' '.join(sleep)} & wait")
    finally:
        signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 300
    while len(processes_with(sleep)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(processes_with(sleep)) == 2
    run.send_signal(number)
    output, _ = run.communicate(timeout=600)
    assert sorted(output.splitlines()) == ["host0  goodbye", "host1  goodbye"]
    assert run.returncode == 128 + number
    assert processes_with(sleep) == []
    assert left_behind(run) == []


@pytest.mark.long
@needs_hosts
def test_it_gives_up_in_time_even_on_a_process_that_ignores_sigterm():
    run = start("--hosts", "1", "--timeout", "1", "bash", "-c", "trap '' TERM; sleep 3600")
    _, errors = run.communicate(timeout=600)
    assert run.returncode == 124
    assert "gave up after 1 seconds" in errors
    assert left_behind(run) == []
