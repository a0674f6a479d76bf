"""Gradients to bytes for each rank, and received bytes to their sum: by Triton on a GPU, else in plain PyTorch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from f8sub.gradients.blocks import decode, encode
from f8sub.gradients.layout import Layout
from f8sub.kernels.triton import support


class Source(NamedTuple):
    """Where the chunks of one gradient are read: each rank's begins ``stride`` elements behind the one before.

    ``data`` is float32, bfloat16 or float16, and contiguous; elements behind the first ``length`` are 0.
    """

    data: torch.Tensor
    stride: int
    length: int


def pack(sources: Sequence[Source], layout: Layout, ranks: int, hosts: int = 1) -> torch.Tensor:
    """What each of ``ranks`` is sent of a source for each chunk: uint8, (ranks, layout.row_bytes).

    Rows are in the order of ranks on their host first, so that equal parts go to the ranks of a host.
    """
    device = sources[0].data.device
    # Nobody reads the bytes between chunks.
    out = torch.empty(ranks, layout.row_bytes, dtype=torch.uint8, device=device)
    if support.takes(out):
        from f8sub.gradients import triton_launch

        with support.device_of(out):
            for launch in triton_launch.pack(sources, layout, hosts, out):
                launch.run()
        return out
    rows = torch.arange(ranks, device=device, dtype=torch.int64).view(-1, hosts).t().flatten()
    for source, chunk in zip(sources, layout.chunks, strict=True):
        needed = source.stride * (ranks - 1) + chunk.size
        x = F.pad(source.data.flatten()[: source.length].float(), (0, max(0, needed - source.length)))
        x = x.as_strided((ranks, chunk.size), (source.stride, 1))
        if layout.codes:
            codes, exponents = encode(x)
            out[rows, chunk.scale_at : chunk.scale_at + chunk.blocks] = exponents
        else:
            codes = x.bfloat16().view(torch.uint8)
        out[rows, chunk.code_at : chunk.code_at + codes.shape[1]] = codes
    return out


def add(received: torch.Tensor, layout: Layout, factor: float, out: torch.Tensor) -> None:
    """Write the sum of the rows, added in float32 in their order, times ``factor`` to ``out``, (layout.numel,)."""
    if support.takes(received):
        from f8sub.gradients import triton_launch

        with support.device_of(out):
            for launch in triton_launch.add(received, layout, factor, out):
                launch.run()
        return
    for chunk in layout.chunks:
        codes = received[:, chunk.code_at : chunk.code_at + chunk.size * (1 if layout.codes else 2)]
        if layout.codes:
            rows = decode(codes, received[:, chunk.scale_at : chunk.scale_at + chunk.blocks])
        else:
            rows = codes.contiguous().view(torch.bfloat16).float()
        total = torch.zeros(chunk.size, dtype=torch.float32, device=out.device)
        for row in rows:
            total += row
        out[chunk.out_at : chunk.out_at + chunk.size] = total * factor
