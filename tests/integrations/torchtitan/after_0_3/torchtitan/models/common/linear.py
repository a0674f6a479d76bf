import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.protocols.module import Module


class Linear(nn.Linear, Module):
    """One projection, or several that are stacked in a weight of three dimensions."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_features: int
        out_features: int
        num_linears: int = 1
        bias: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_features, config.num_linears * config.out_features, bias=config.bias)
        self.out_features, self.num_linears = config.out_features, config.num_linears
        if config.num_linears > 1:
            shape = (config.num_linears, config.out_features)
            self.weight = nn.Parameter(self.weight.detach().unflatten(0, shape))

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight.flatten(0, -2), a=math.sqrt(5))

    def _flatten_weight_and_bias(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.weight.flatten(0, -2), None if self.bias is None else self.bias.flatten()

    def _unflatten_output(self, output: torch.Tensor) -> torch.Tensor:
        return output if self.num_linears == 1 else output.unflatten(-1, self.weight.shape[:-1])

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self._flatten_weight_and_bias()
        return self._unflatten_output(self._linear(input, weight, bias))

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(input, weight, bias)


class ColumnParallelLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Here the input is gathered of tensor-parallel ranks.
        return super().forward(input)


class RowParallelLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self._flatten_weight_and_bias()
        if bias is not None:
            bias = bias + 0.0  # a part of the sum over tensor-parallel ranks
        # Here the output is reduced.
        return self._unflatten_output(self._linear(input, weight, bias))


class FP32OutputLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(input.float(), weight.float(), bias)
