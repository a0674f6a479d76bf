"""Looks at a machine: GPUs, versions, variables; nothing is imported for it but torch."""

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
"""Time limit of nvidia-smi, in seconds."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Describes GPUs of one kind.

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
    """Holds what was found; None for what there is not.

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
        problem: why torch cannot use the GPUs that it sees.
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
    problem: str | None
    variables: dict[str, str]
    peers: dict[str, str | None]

    @property
    def gpu_count(self) -> int:
        """The number of GPUs that torch sees."""
        return sum(gpu.count for gpu in self.gpus)


def look() -> Machine:
    """Look at this machine."""
    drivers = _by_nvidia_smi()
    hip = torch.version.hip
    gpus, problem = _gpus()
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=f"ROCm {hip}" if hip else torch.version.cuda,
        driver=drivers[0] if drivers else None,
        triton=version_of("triton"),
        nccl=_nccl() if gpus else None,
        gpus=gpus,
        # one line per GPU
        gpus_without_torch=len(drivers),
        problem=problem,
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name in VARIABLES or name.startswith(PREFIXES)
        },
        peers={name: version_of(name) for name in PEERS},
    )


def version_of(package: str) -> str | None:
    """Return the version of a package that can be imported; None for any other."""
    # What is installed may not be what this Python imports.
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> tuple[tuple[GpuFacts, ...], str | None]:
    """Return the GPUs, or why they cannot be used."""
    alike: dict[tuple[str, tuple[int, int], int], int] = {}
    # The count may come from the driver alone; properties initialize CUDA, which may fail.
    for index in range(torch.cuda.device_count()):
        try:
            found = torch.cuda.get_device_properties(index)
        except (RuntimeError, AssertionError) as error:  # the driver is too old, or the device is lost
            return (), str(error).partition("\n")[0]
        # Equal GPUs are one entry.
        key = found.name, (found.major, found.minor), found.total_memory
        alike[key] = alike.get(key, 0) + 1
    found_gpus = [GpuFacts(name, count, sm, memory) for (name, sm, memory), count in alike.items()]
    return tuple(found_gpus), None


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


def _by_nvidia_smi() -> list[str]:
    """Return the driver's version, once per GPU; empty if there is no nvidia-smi, or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        # Limited in time: a driver that hangs would hang the doctor.
        done = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split()
