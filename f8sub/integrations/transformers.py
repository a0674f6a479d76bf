"""Float8Callback: scales after each optimizer step of the Trainer of transformers."""

from typing import Any

import torch
from transformers import TrainerCallback

from f8sub.weights.precompute_scales import precompute_scales, register_precompute_hook

__all__ = ["Float8Callback"]


class Float8Callback(TrainerCallback):
    """Scales of a converted model once the Trainer sharded and loaded it, and after every optimizer step.

        model = f8sub.convert_to_float8(model)
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Float8Callback()])

    A training that fails or is repeated leaves one hook. Where the model was not converted, ``train()`` raises
    Float8ConfigError.
    """

    def __init__(self) -> None:
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Compute the scales, and register the hook on this training's optimizer."""
        self.on_train_end(args, state, control)
        precompute_scales(given["model"])
        self._hook = register_precompute_hook(given["optimizer"], given["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Take the hook off again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
