from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchtitan.components.optim import Optim
from torchtitan.config import Configurable, OverrideConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.parallelism_context import ParallelismContext


class TrainingEngine(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        optim: Optim.Config = field(default_factory=Optim.Config)
        training: TrainingConfig = field(default_factory=TrainingConfig)
        parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
        activation_checkpoint: Any = None
        override: OverrideConfig = field(default_factory=OverrideConfig)

        def __post_init__(self) -> None:
            if self.optim.enable_cuda_graph and self.training.disable_cuda_graphs:
                raise ValueError("the optimizer's CUDA graph needs CUDA graphs")

    def __init__(self, config: Config, *, model_config: Any) -> None:
        self.config, self.model_config, self.steps = config, model_config, 0
        self.parallelism_context = ParallelismContext.of_the_world(dist.get_world_size())

    def initialize(self) -> None:
        with torch.device("meta"):
            model = self.model_config.build()
        self.model_cls = type(model)
        self.model_config.get_nparams_and_flops(model, self.config.training.max_context_length)
        model = model.parallelize(
            parallelism_context=self.parallelism_context,
            training=self.config.training,
            parallelism=self.config.parallelism,
            ac_config=self.config.activation_checkpoint,
            local_compile_regions=self.model_config.local_compile_regions,
        )
        self.model_parts = [model]
        torch.manual_seed(0)
        for part in self.model_parts:
            part.to_empty(device="cpu")
            with torch.no_grad():
                part.init_weights(buffer_device=None)
            part.train()
        self.optim = self.config.optim.build(
            model_parts=self.model_parts,
            parallelism_context=self.parallelism_context,
            training_steps=self.config.training.steps,
            pp_has_last_stage=True,
        )
        self.model_cls._register_optimizer_hooks(
            self.optim.optimizers, self.model_parts, self.parallelism_context
        )

    def forward_backward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.optim.zero_grad()
        logits = self.model_parts[0](tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def optim_step(self, loss: torch.Tensor) -> None:
        self.steps += 1
        self.optim.step(loss, current_step=self.steps)
