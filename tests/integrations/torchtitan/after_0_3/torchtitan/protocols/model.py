from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.protocols.module import Module


class BaseModel(Module, ABC):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    state_dict_adapter_cls: ClassVar[type | None] = None

    def init_weights(self, **kwargs: Any) -> None:
        self.init_states(buffer_device=kwargs.get("buffer_device"))

    def parallelize(self, *, parallelism_context: Any, training: Any, parallelism: Any, **others: Any) -> Any:
        for module in self.modules():
            if isinstance(module, Module):
                module._parallelize(parallelism_context)
        self._apply_fsdp(parallelism_context=parallelism_context, training=training, parallelism=parallelism)
        return self

    @abstractmethod
    def _apply_fsdp(self, *, parallelism_context: Any, training: Any, parallelism: Any) -> None: ...

    @classmethod
    def _register_optimizer_hooks(cls, optimizers: Any, model_parts: Any, parallelism_context: Any) -> None:
        """Here a mixture's model balances its load."""
