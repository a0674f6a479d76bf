"""What a step does with the shards of many weights: their amaxes in a table, and the scales of those."""

from __future__ import annotations

import torch

from f8sub import Float8Format, Operand
from f8sub.kernels import scales
from f8sub.kernels.triton import multi_tensor_launch, support
from f8sub.kernels.triton.multi_tensor_launch import ShardInTable

COUNT = 28
"""Weights of four Llama blocks."""


class Shards:
    """Weights that make up x, each a whole one, with a table of their format; x is cut by rows into ``COUNT``."""

    def __init__(self, x: torch.Tensor, format: Float8Format) -> None:
        self.format = format
        self.weights = [part.float() for part in x.chunk(COUNT)]
        shapes = [format.tile.scale_shape(tuple(weight.shape)) for weight in self.weights]
        sizes = [rows * cols for rows, cols in shapes]
        self.amax, self.scale, self.scale_inv = (torch.zeros(sum(sizes), device=x.device) for _ in range(3))
        self.parts = self.amax.split(sizes)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        matrices = [
            ShardInTable(weight, format.tile, (0, 0), start, cols)
            for weight, start, (_, cols) in zip(self.weights, starts, shapes, strict=True)
        ]
        self.launches = []
        if all(multi_tensor_launch.takes(matrix, x.device) for matrix in matrices):
            written = self.scale, self.scale_inv
            scales = multi_tensor_launch.scales(self.amax, None, *written, format, torch.bfloat16)
            self.launches = [*multi_tensor_launch.amaxes(matrices, self.amax), scales]

    @property
    def table(self) -> tuple[Operand]:
        """The scales, as a quantizer's result is compared."""
        return (Operand(self.scale, self.scale_inv, self.format),)


def by_launches(shards: Shards) -> tuple[Operand]:
    """By one launch for all amaxes and one for all scales, where there are kernels."""
    if not support.takes(shards.amax):
        return by_operators(shards)
    shards.amax.zero_()
    for launch in shards.launches:
        launch.run()
    return shards.table


def by_operators(shards: Shards) -> tuple[Operand]:
    """By torch's operators, which find amaxes of whole weights together and others one by one."""
    amax, tile = shards.amax.zero_(), shards.format.tile
    if tile.is_whole:
        amax.copy_(torch.stack(torch._foreach_norm(shards.weights, torch.inf)))
    else:
        for weight, part in zip(shards.weights, shards.parts, strict=True):
            part.copy_(scales.shard_amax(weight, tile, (0, 0)).flatten())
    amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    made = scales.scales_or_nan(amax.bfloat16().float(), shards.format, None)
    shards.scale.copy_(made.scale)
    shards.scale_inv.copy_(made.scale_inv)
    return shards.table
