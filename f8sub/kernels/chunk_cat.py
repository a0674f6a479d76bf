"""Copies gradients to where FSDP2 reduces them: ``fsdp::chunk_cat``, each rank's chunks side by side, by the GPU alone.

torch's operator fills a table on the host with an entry for every few kilobytes, which takes it milliseconds for a
layer of a large model. Here each gradient is one launch, which needs no table.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from f8sub.kernels.triton import support

if TYPE_CHECKING:
    from f8sub.kernels.triton.launch import Launch, Launches

BLOCK = 4096
"""Elements that a program copies."""

LEAST = 2**20
"""Elements of all gradients from which launches take the host less time than the table."""

MOST = 64
"""Gradients of one copy: so many launches take the host less time than the table of ``LEAST`` elements a gradient."""


_DTYPES = torch.float32, torch.bfloat16, torch.float16


def runs_on(device: torch.device) -> bool:
    """Return whether there are kernels for a device."""
    return support.why_no_triton(device) is None


def copied(gradients: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
    """Copy gradients by ``chunk_cat`` if it ``takes`` them, and return whether it does."""
    if not takes(gradients, out):
        return False
    chunk_cat(gradients, out)
    return True


def takes(gradients: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
    """Return whether ``chunk_cat`` copies these gradients; torch's operator copies all others.

    Args:
        gradients: the gradients of one group of parameters.
        out: (ranks, elements of all chunks of one rank).
    """
    return (
        LEAST <= out.numel() <= MOST * 2**31
        and len(gradients) <= MOST
        and out.is_contiguous()
        and out.dtype in _DTYPES
        and support.takes(out)
        and all(_takes(each, out) for each in gradients)
    )


def _takes(gradient: torch.Tensor, out: torch.Tensor) -> bool:
    # Offsets in a chunk have 32 bits.
    return (
        gradient.dtype in _DTYPES
        and gradient.device == out.device
        and support.takes(gradient)
        and gradient.is_contiguous()
        and gradient.dim() > 0
        and gradient.numel() < 2**31 - BLOCK
    )


def chunk_cat(gradients: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Copy gradients that ``takes`` takes as ``torch.ops.fsdp.chunk_cat`` does along dimension 0, to the bit.

    Args:
        gradients: of any shape; each is cut along dimension 0 into as many chunks as there are ranks, the last ones
            filled up with zeros.
        out: (ranks, elements of all chunks of one rank), float32, bfloat16 or float16.
    """
    from f8sub.kernels.triton import launch

    ranks, stride = out.shape
    flat, begin = out.view(-1), 0
    with support.device_of(out):
        for gradient in gradients:
            source = gradient.view(-1)
            chunk = -(-gradient.shape[0] // ranks) * (gradient.numel() // gradient.shape[0])
            make = functools.partial(_launches, source, flat, begin, ranks, chunk, stride)
            launch.run(("chunk_cat", ranks, chunk, begin), (source, flat), make)
            begin += chunk
    if begin != stride:
        raise RuntimeError(f"chunks of {begin} elements were copied into rows of {stride}")


def _launches(
    source: torch.Tensor, flat: torch.Tensor, begin: int, ranks: int, chunk: int, stride: int
) -> "Launches":
    from f8sub.kernels.triton.launch import Launches

    return Launches([launching(source, flat[begin:], ranks, chunk, stride)], [], [])


def launching(source: torch.Tensor, out: torch.Tensor, ranks: int, chunk: int, stride: int) -> "Launch":
    """Return the launch that copies one gradient.

    Args:
        source: the gradient, flat.
        out: flat, from the first rank's chunk on.
        ranks: how many chunks there are.
        chunk: elements of a chunk.
        stride: elements from one rank's chunk to the next rank's.
    """
    from f8sub.kernels.triton import chunks
    from f8sub.kernels.triton.launch import Launch

    arguments = {
        "source_ptr": source,
        "out_ptr": out,
        "length": source.numel(),
        "chunk": chunk,
        "stride": stride,
        "BLOCK": BLOCK,
    }
    return Launch(chunks.copy_chunks, ranks * -(-chunk // BLOCK), arguments, {"num_warps": 8})
