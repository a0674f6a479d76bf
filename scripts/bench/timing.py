"""How everything is timed: CUDA graphs, events, the host; kernels of a call, memory; variants in turns; the machine.

On the CPU the same names give wall-clock times and no figures of a GPU.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Run = Callable[[Any], Any]
"""What is timed, by one of the sets of inputs that take turns."""

SETS = 3
"""Sets of inputs, so that L2 holds none of the next."""


def by_graph(run: Run, sets: Sequence[Any], pool: Any) -> Callable[[], float]:
    """Milliseconds a call of ``run``: a CUDA graph of one call a set, replayed once by each call.

    All graphs share the memory of ``pool``: their results are not looked at, and one runs at a time.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for given in sets:
            run(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        for given in sets:
            run(given)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / len(sets)

    return replay


def by_launches(
    run: Run, sets: Sequence[Any], device: torch.device, between: Callable[[], Any] = lambda: None
) -> Callable[[], float]:
    """Milliseconds a call of ``run`` as it is launched from Python: events around each, what waits included.

    Args:
        run: what is timed.
        sets: one call each, after one of the first set that is not timed.
        device: on the CPU, wall-clock time.
        between: called before each, and not timed.
    """

    def on_the_gpu() -> float:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in sets]
        between()
        run(sets[0])
        for (start, end), given in zip(events, sets, strict=True):
            between()
            start.record()
            run(given)
            end.record()
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in events) / len(sets)

    def on_the_cpu() -> float:
        total = 0.0
        for given in sets:
            between()
            total += host_ms(run, given, device)
        return total / len(sets)

    return on_the_gpu if device.type == "cuda" else on_the_cpu


def graph_pool(device: torch.device) -> Any:
    """Memory that graphs share; None on the CPU."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def without_host(run: Run, sets: Sequence[Any], device: torch.device, pool: Any) -> Callable[[], float]:
    """``by_graph`` where there are graphs, else ``by_launches``."""
    return by_graph(run, sets, pool) if device.type == "cuda" else by_launches(run, sets, device)


def host_ms(run: Run, given: Any, device: torch.device) -> float:
    """Milliseconds until a call returns, not waiting for what it launched on a GPU that was idle."""
    wait(device)
    begin = time.perf_counter()
    run(given)
    return (time.perf_counter() - begin) * 1e3


def wait(device: torch.device) -> None:
    """Until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turns(
    timers: Mapping[Any, Callable[[], float]], rounds: int, after: Callable[[], Any] = lambda: None
) -> dict[Any, list[float]]:
    """What every timer reads, in rounds of all of them, so that a change of clocks or heat meets all alike.

    ``after`` is called after each round.
    """
    found: dict[Any, list[float]] = {key: [] for key in timers}
    for _ in range(rounds):
        for key, timer in timers.items():
            found[key].append(timer())
        after()
    return found


def cpu_in_turns(timers: Mapping[Any, Callable[[], float]], rounds: int) -> dict[Any, list[float]]:
    """``in_turns`` of timers of this process's CPU time: garbage is collected between rounds alone."""
    gc.disable()
    try:
        return in_turns(timers, rounds, gc.collect)
    finally:
        gc.enable()


def summary(times: Sequence[float], unit: str = "ms") -> dict[str, float]:
    """Median and distance of the quartiles."""
    low, median, high = statistics.quantiles(times, n=4)
    return {f"median_{unit}": median, f"spread_{unit}": high - low}


def kernels(run: Run, given: Any, device: torch.device) -> dict[str, Any]:
    """``kernels`` of one call by name, with copies and fills, the longest first, and their number, ``launches``.

    None for both on the CPU, or where none can be seen.
    """
    nothing = {"kernels": None, "launches": None}
    if device.type != "cuda":
        return nothing
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    wait(device)
    with torch.profiler.profile(activities=activities) as profile:
        run(given)
        wait(device)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        found = by_name(json.loads(Path(file.name).read_text())["traceEvents"])
    return {"kernels": found, "launches": sum(kernel["launches"] for kernel in found)} if found else nothing


def by_name(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the events of a Chrome trace, what ran on the GPU: number and microseconds by name, the longest first."""
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            times[event["name"]] += event["dur"]
            counts[event["name"]] += 1
    return [{"name": name, "launches": counts[name], "us": us} for name, us in times.most_common()]


def peak_bytes(run: Run, given: Any, device: torch.device) -> int | None:
    """Bytes that a call has allocated at most, beyond what was there before; None on the CPU."""
    if device.type != "cuda":
        return None
    wait(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run(given)
    wait(device)
    return torch.cuda.max_memory_allocated(device) - before


def sqnr(found: torch.Tensor, right: torch.Tensor) -> float:
    """Signal over error, in dB."""
    right = right.float()
    error = (found.float() - right).square().sum(dtype=torch.float64)
    return float(10 * torch.log10(right.square().sum(dtype=torch.float64) / error))


def output_of(*command: str) -> str | None:
    """What a command prints; None where it does not run."""
    try:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(device: torch.device) -> dict[str, Any]:
    """Read before and after the figures, since clocks, power and heat change meanwhile."""
    fields = "name,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,driver_version"
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "nvidia_smi": output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: version_of(name) for name in ("triton", "torchao", "transformers")},
        "commit": output_of("git", "rev-parse", "HEAD"),
    }
