"""Float8 under Lightning: one callback of its Trainer."""

from typing import Any

import lightning
import torch
from lightning.pytorch.utilities import rank_zero_info

import f8sub
from f8sub.integrations.one_line import HIGH_PRECISION, convert_once

__all__ = ["Float8Callback"]


class Float8Callback(lightning.Callback):
    """Converts a module before it is sharded, reports it, and computes scales after each optimizer step.

        trainer = lightning.Trainer(strategy=ModelParallelStrategy(), callbacks=[Float8Callback("tensorwise")])

    The module is converted in ``setup``, which Lightning calls before ``configure_model``: so its layers are to be
    constructed in ``__init__``, on meta if they are large, and sharded in ``configure_model``. A module that
    converts itself where it constructs its layers stays as it is. The first scales are computed when training begins,
    from weights that are sharded and loaded by then, and the hooks go when it ends.

    Args:
        recipe: as ``convert_to_float8`` takes it; None for its default.
        attention: "float8" runs ``scaled_dot_product_attention`` over 8192 tokens and more by cuDNN's float8 kernels,
            which changes numbers; "float8_forward" with its backward in bf16; see ``f8sub.attend_in_float8``. With
            ``backend="reference"`` sequences of any length, by the reference. A model that attends in float8 already
            stays as it is.
        options: other keywords of ``convert_to_float8``.

    Raises:
        Float8ConfigError: what ``convert_to_float8`` and ``attend_in_float8`` raise; when training begins, a module
            whose layers were constructed in ``configure_model`` and not converted there.
    """

    def __init__(self, recipe: Any = None, *, attention: str = HIGH_PRECISION, **options: Any) -> None:
        self._recipe, self._attention, self._options = recipe, attention, options
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Convert the module; one that has no parameters yet constructs its layers in ``configure_model``."""
        if next(pl_module.parameters(), None) is not None:
            rank_zero_info(convert_once(pl_module, self._recipe, self._options, self._attention))

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Compute the scales, and register the hooks on this training's optimizers."""
        f8sub.precompute_scales(pl_module)
        self._hooks = [f8sub.register_precompute_hook(each, pl_module) for each in trainer.optimizers]

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """Remove the hooks where training failed."""
        self.on_train_end(trainer, pl_module)
