"""Our own GEMM of operands with scales of blocks, for Hopper: squares of any edge, single rows, any dtypes.

The tiles it takes were measured where ``table`` has the GPU; elsewhere ``default_config`` decides by shape.
"""

import functools
import importlib.util

import torch

from f8sub.formats import ALL, Float8Format, Operand
from f8sub.kernels.gemm import tuning
from f8sub.kernels.gemm.block_scales import BLOCK, whole_blocks
from f8sub.kernels.gemm.tuning import Config
from f8sub.kernels.triton import support

CAPABILITY = (9, 0)
"""Hopper: its tensor memory accelerator and warpgroup instructions are what the kernels are made of."""


def why_not(a: Float8Format, b: Float8Format, device: torch.device) -> str | None:
    """Return why it cannot run, see ``select.Backend``."""
    if not a.is_plain or not b.is_plain:
        return f"takes float8 with float32 scales of one level, not {a} and {b}"
    if unknown := {str(f.tile) for f in (a, b) if not whole_blocks(f.tile.cols, BLOCK)}:
        return f"takes tiles of whole blocks of 1x{BLOCK}, not {', '.join(sorted(unknown))}"
    # Scales that do not change along K are applied once, to the whole sum: nothing to do block by block.
    if a.tile.cols == b.tile.cols == ALL:
        return "takes scales of blocks of at least one operand; one per tensor or per row is for scaled_mm"
    return why_not_device(device)


def gemm_nt(a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool) -> torch.Tensor:
    """Compute y [M, N] = a [M, K] @ b [N, K].t(), see ``select.Backend``; ``fast_accum`` has no effect.

    Partial sums are scaled, in float32, every 128 elements of K.
    """
    del fast_accum
    rows, depth = a.data.shape
    config = _config(a.format, b.format, a.data.device, (rows, depth, b.data.shape[0]))
    return multiply(a, b, out_dtype, config)


def multiply(a: Operand, b: Operand, out_dtype: torch.dtype, config: Config) -> torch.Tensor:
    """Run ``gemm_nt`` in given tiles: (M, K) x (N, K) -> (M, N)."""
    from f8sub.kernels.triton import gemm_launch
    from f8sub.kernels.triton.launch import Launches, run

    def make() -> Launches:
        launches, out = gemm_launch.multiplication(a, b, out_dtype, config, multiprocessors(a.data.device))
        # K in parts: the first launch writes partial sums [parts, M, N], float32, and the
        # second one adds them into ``out``.
        parts = launches[0].arguments["out_ptr"]
        return Launches(launches, [out] if parts is out else [out, parts], [])

    with support.device_of(a.data):
        return run((a.format, b.format, out_dtype, config), (*a.tensors, *b.tensors), make)[0]


def default_config(shape: tuple[int, int, int], multiprocessors: int) -> Config:
    """Choose tiles for a product (M, K, N) of which nothing was measured.

    Of few rows as many tiles as there are multiprocessors, so that all of them read ``b``, and K in parts where 32
    columns a tile are not few enough. Source: reasoning, see ``table`` for what was measured.
    """
    rows, depth, cols = shape
    if rows > tuning.FEW_ROWS:
        return Config(128, 256, stages=4, persistent=True, group=16)
    # The widest tile that still keeps three quarters of the multiprocessors busy.
    wide = next((edge for edge in (128, 64, 32) if cols >= edge * multiprocessors * 3 // 4), 32)
    tiles, blocks = -(-cols // wide), -(-depth // BLOCK)
    # At least 4 blocks of K to a part: a shorter one spends its time filling its pipeline.
    parts = max(1, min(multiprocessors // tiles, blocks // 4, 8))
    return Config(64, wide, stages=8, group=1, parts=parts)


@functools.lru_cache(maxsize=4096)
def _config(a: Float8Format, b: Float8Format, device: torch.device, shape: tuple[int, int, int]) -> Config:
    found = None
    if device.type == "cuda":
        # Its sums are always of one block: nothing is measured apart for fast accumulation.
        found = tuning.nearest(torch.cuda.get_device_name(device), a, b, shape, fast_accum=False)
    if found is None or found.config is None:
        return default_config(shape, multiprocessors(device))
    return Config(**found.config)


@functools.cache
def why_not_device(device: torch.device) -> str | None:
    """Return why kernels for Hopper do not run on a device; None where they do."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"runs on NVIDIA's GPUs, not on {device}"
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed"
    from f8sub.kernels.triton import triton_compat

    if (reason := triton_compat.why_no_gluon()) is not None:
        return f"needs Triton's Gluon, but triton {reason}"
    found = torch.cuda.get_device_capability(device)
    if found == CAPABILITY:
        return None
    return f"is written for SM 9.0 (Hopper), found SM {found[0]}.{found[1]}"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
