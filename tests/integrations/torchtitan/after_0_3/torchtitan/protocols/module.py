from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchtitan.config.configurable import Configurable


class Module(nn.Module, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def _parallelize(self, parallelism_context: Any) -> None:
        """Distribute parameters over tensor-parallel ranks, of which there are none here."""


class ModuleList(nn.ModuleList, Module):
    pass


class ModuleDict(nn.ModuleDict, Module):
    pass
