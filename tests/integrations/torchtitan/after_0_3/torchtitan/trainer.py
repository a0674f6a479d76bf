from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.config.configurable import Configurable
from torchtitan.config.override import apply_overrides
from torchtitan.protocols.module import Module
from torchtitan.training_engine import TrainingEngine


class Trainer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(TrainingEngine.Config):
        model: Module.Config
        hf_assets_path: str = "./tests/assets/tokenizer"

        def __post_init__(self) -> None:
            TrainingEngine.Config.__post_init__(self)

    def __init__(self, config: Config) -> None:
        self.config = config
        apply_overrides(config.override, config)
        self.engine = TrainingEngine(config, model_config=config.model)
        self.engine.initialize()

    def train(self, batches: Any) -> list[float]:
        losses = []
        for tokens in batches:
            loss = self.engine.forward_backward(tokens)
            self.engine.optim_step(loss)
            losses.append(loss.item())
        return losses


def batches(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (2, 33), generator=generator) for _ in range(steps)]
