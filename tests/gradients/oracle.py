"""What a reduction has to give, by numpy: blocks in float64, sums in float32 in the order of the ranks."""

import math
from collections.abc import Sequence

import numpy as np
import torch

BLOCK, TOP = 128, 416.0
HIGHEST = 240 * 2.0**120


def rounded(x: np.ndarray) -> np.ndarray:
    """Elements of one rank's chunk, one dimension, as float64: to e4m3 relative to their block's power of two."""
    x = x.astype(np.float64)
    out = np.empty_like(x)
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        finite = np.isfinite(block)
        largest = np.abs(block[finite]).max(initial=0.0)
        power = max(-126, math.ceil(math.log2(largest / TOP))) if largest else 0
        # log2 may be off by its last bit.
        while power > -126 and largest <= TOP * 2.0 ** (power - 1):
            power -= 1
        while largest > TOP * 2.0**power:
            power += 1
        scaled = np.where(finite, block, 0.0) / 2.0**power
        step = 2.0 ** (np.maximum(np.frexp(scaled)[1] - 1, -6) - 3)
        nearest = np.rint(scaled / step) * step * 2.0**power
        kept = np.clip(nearest, -HIGHEST, HIGHEST)  # the nearest one that float32 holds
        out[start : start + BLOCK] = np.where(finite, kept, block)
    return out


def chunks(gradient: np.ndarray, ranks: int, dim: int = 0) -> list[np.ndarray]:
    """What each rank keeps, with the rows that it lacks as zeros."""
    size = -(-gradient.shape[dim] // ranks)
    padding = [(0, 0)] * gradient.ndim
    padding[dim] = (0, size * ranks - gradient.shape[dim])
    parts = np.split(np.pad(gradient, padding), ranks, axis=dim)
    return [np.ascontiguousarray(part).reshape(-1) for part in parts]


def summed(
    gradients: Sequence[torch.Tensor], factor: float | None = None, dim: int = 0, local: int = 1
) -> torch.Tensor:
    """The whole reduced gradient, float32, of the ranks' own ones; ``local`` ranks of a host add bfloat16 first."""
    ranks = len(gradients)
    with np.errstate(invalid="ignore", over="ignore"):
        of_ranks = [chunks(gradient.float().numpy(), ranks, dim) for gradient in gradients]
        kept = []
        for keeper in range(ranks):
            sent = [of_rank[keeper] for of_rank in of_ranks]
            if local > 1:
                halves = [torch.from_numpy(part).bfloat16().float().numpy() for part in sent]
                sent = [in_order(halves[host : host + local]) for host in range(0, ranks, local)]
            kept.append(in_order([rounded(part).astype(np.float32) for part in sent]))
        factor = 1 / ranks if factor is None else factor
        kept = [part * np.float32(factor) for part in kept]
    shape = list(gradients[0].shape)
    rows = [*shape[:dim], -1, *shape[dim + 1 :]]
    whole = np.concatenate([part.reshape(rows) for part in kept], axis=dim)
    return torch.from_numpy(whole).narrow(dim, 0, shape[dim]).contiguous()


def in_order(parts: Sequence[np.ndarray]) -> np.ndarray:
    total = np.zeros(len(parts[0]), np.float32)
    for part in parts:
        total = total + part.astype(np.float32)
    return total


def decibels(found: torch.Tensor, right: torch.Tensor) -> float:
    error = (found.double() - right.double()).square().sum()
    return float(10 * torch.log10(right.double().square().sum() / error))
