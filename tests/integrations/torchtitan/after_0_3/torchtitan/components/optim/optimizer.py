import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from torchtitan.config.configurable import Configurable


class AdamW(torch.optim.AdamW, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pattern: str
        lr: float = 8e-4
        fused: bool | None = True

    def __init__(self, config: Config, *, params: Any) -> None:
        super().__init__(params, lr=config.lr, fused=config.fused)


class OptimizersContainer(Optimizer, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        optimizers: list[AdamW.Config] = field(default_factory=list)

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module], **others: Any) -> None:
        self.model_parts, self.optimizers, parameters = model_parts, [], []
        for part in model_parts:
            for each in config.optimizers:
                chosen = [p for name, p in part.named_parameters() if re.search(each.pattern, name)]
                self.optimizers.append(each.build(params=chosen))
                parameters += chosen
        Optimizer.__init__(self, parameters, {})

    def step(self, closure: None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
