from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torchtitan.config.configs import TrainingConfig
from torchtitan.config.parallelism import ParallelismConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfigTransformContext:
    training: TrainingConfig
    parallelism: ParallelismConfig


class ModelConfigTransform(ABC):
    @abstractmethod
    def transform(self, model: Any, *, context: ModelConfigTransformContext | None = None) -> Any:
        """``model``, rewritten in place, or another root."""
