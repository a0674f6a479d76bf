"""What a machine has: GPUs, versions, variables; nothing is imported for it but torch."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass

import torch

PEERS = (
    "transformers",
    "torchtitan",
    "torchao",
    "accelerate",
    "lightning",
    "peft",
    "liger-kernel",
    "safetensors",
    "rich",
    "matplotlib",
)
"""Packages that f8sub works beside; none is needed."""

PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCHINDUCTOR_", "TRITON_", "GLOO_")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "TORCH_COMPILE_DISABLE",
    "TORCHDYNAMO_DISABLE",
    "OMP_NUM_THREADS",
)
"""Variables of the environment that change a run's speed, or whether it starts."""

SECONDS = 10
"""What nvidia-smi may take."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """GPUs of one kind.

    Attributes:
        name: as the driver has it.
        count: how many of them.
        capability: major and minor.
        memory: bytes of one.
    """

    name: str
    count: int
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found; None for what there is not.

    Attributes:
        system: operating system and processor.
        python: its version.
        torch: its version.
        cuda: what torch was built with; for ROCm its version, with that word.
        driver: NVIDIA's, by nvidia-smi.
        triton: its version.
        nccl: the version that torch was built with.
        gpus: those that torch sees.
        gpus_without_torch: how many nvidia-smi sees.
        variables: those that are set.
        peers: versions of ``PEERS``.
    """

    system: str
    python: str
    torch: str
    cuda: str | None
    driver: str | None
    triton: str | None
    nccl: str | None
    gpus: tuple[GpuFacts, ...]
    gpus_without_torch: int
    variables: dict[str, str]
    peers: dict[str, str | None]

    @property
    def gpu_count(self) -> int:
        """How many GPUs torch sees."""
        return sum(gpu.count for gpu in self.gpus)


def look() -> Machine:
    """Look at this machine."""
    drivers = _by_nvidia_smi()
    hip = torch.version.hip
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=f"ROCm {hip}" if hip else torch.version.cuda,
        driver=drivers[0] if drivers else None,
        triton=version_of("triton"),
        nccl=_nccl(),
        gpus=_gpus(),
        gpus_without_torch=len(drivers),
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name in VARIABLES or name.startswith(PREFIXES)
        },
        peers={name: version_of(name) for name in PEERS},
    )


def version_of(package: str) -> str | None:
    """The version of a package that can be imported."""
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> tuple[GpuFacts, ...]:
    alike: dict[tuple[str, tuple[int, int], int], int] = {}
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        key = found.name, (found.major, found.minor), found.total_memory
        alike[key] = alike.get(key, 0) + 1
    return tuple(
        GpuFacts(name, count, capability, memory) for (name, capability, memory), count in alike.items()
    )


def _nccl() -> str | None:
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.nccl.version()
    return ".".join(map(str, found))


def _by_nvidia_smi() -> list[str]:
    """The driver's version, once a GPU; empty where there is no nvidia-smi, or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split()
