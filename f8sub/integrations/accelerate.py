"""Float8 under Hugging Face accelerate: ``prepare`` in place of ``accelerator.prepare``."""

from typing import Any

import torch
from accelerate import Accelerator

import f8sub
from f8sub.integrations.one_line import HIGH_PRECISION, convert_once

__all__ = ["prepare"]


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    recipe: Any = None,
    attention: str = HIGH_PRECISION,
    **options: Any,
) -> Any:
    """Convert the model, prepare everything with accelerate, and compute scales after each optimizer step.

        model, optimizer, data = f8sub.integrations.accelerate.prepare(accelerator, model, optimizer, data)

    The model is converted before accelerate shards it, and the summary of ``conversion_report`` is printed by the main
    process; one that was converted before stays as it is. The first scales are computed at once, and again whenever a
    state dict is loaded into the model, by ``accelerator.load_state`` for instance.

    Args:
        accelerator: with ``mixed_precision`` "bf16" or "no", and any plug-in that shards, FSDP2's for instance.
        objects: what ``accelerator.prepare`` takes, in any order: one model and one optimizer of its parameters among
            them.
        recipe: as ``convert_to_float8`` takes it; None for its default.
        attention: "float8" runs ``scaled_dot_product_attention`` over 8192 tokens and more by cuDNN's float8 kernels,
            which changes numbers; "float8_forward" with its backward in bf16; see ``f8sub.attend_in_float8``. With
            ``backend="reference"`` sequences of any length, by the reference. A model that attends in float8 already
            stays as it is.
        options: other keywords of ``convert_to_float8``.

    Returns:
        What ``accelerator.prepare`` returns: the same objects, prepared, in the same order.

    Raises:
        Float8ConfigError: ``mixed_precision="fp8"``, another number of models or optimizers than one, a model that was
            converted with another recipe, or what ``convert_to_float8`` and ``attend_in_float8`` raise.
    """
    if accelerator.mixed_precision == "fp8":
        raise f8sub.Float8ConfigError(
            'mixed_precision="fp8" has accelerate convert the model by another library; leave it at "bf16", or call '
            "f8sub.integrations.torchao.take_over() before to have f8sub convert it"
        )
    models, optimizers = (
        [place for place, each in enumerate(objects) if isinstance(each, kind)]
        for kind in (torch.nn.Module, torch.optim.Optimizer)
    )
    if len(models) != 1 or len(optimizers) != 1:
        raise f8sub.Float8ConfigError(
            f"f8sub.integrations.accelerate.prepare takes one model and one optimizer, got {len(models)} and "
            f"{len(optimizers)}; for more, call convert_to_float8 before accelerator.prepare and "
            "register_precompute_hook after it"
        )
    accelerator.print(convert_once(objects[models[0]], recipe, options, attention))
    prepared = accelerator.prepare(*objects)
    model = prepared[models[0]]
    f8sub.precompute_scales(model)
    f8sub.register_precompute_hook(prepared[optimizers[0]], model)
    model.register_load_state_dict_post_hook(lambda module, keys: f8sub.precompute_scales(module))
    return prepared
