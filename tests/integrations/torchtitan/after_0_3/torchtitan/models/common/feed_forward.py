from dataclasses import dataclass

import torch
import torch.nn.functional as F

from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module


class FeedForward(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        w13: Linear.Config
        w2: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w13, self.w2 = config.w13.build(), config.w2.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.w13(x).unbind(-2)
        return self.w2(F.silu(gate) * up)
