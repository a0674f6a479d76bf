from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan.components.optim.optimizer import OptimizersContainer
from torchtitan.config.configurable import Configurable


class Optim(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        optimizer: OptimizersContainer.Config = field(default_factory=OptimizersContainer.Config)
        max_norm: float = 1.0
        enable_cuda_graph: bool = False

    def __init__(
        self,
        config: Config,
        *,
        model_parts: Any,
        parallelism_context: Any,
        training_steps: int,
        **others: Any,
    ) -> None:
        self.config = config
        self.parameters = [p for part in model_parts for p in part.parameters()]
        self.optimizers = config.optimizer.build(
            model_parts=model_parts, parallelism_context=parallelism_context, enable_cuda_graph=False
        )

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        self.optimizers.zero_grad(set_to_none=set_to_none)

    def step(self, loss: torch.Tensor, *, current_step: int) -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_norm, foreach=True)
        self.optimizers.step()
        return norm
