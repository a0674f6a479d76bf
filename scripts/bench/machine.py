"""What figures are of: the GPU and its clocks, versions, the commit."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

import torch


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
