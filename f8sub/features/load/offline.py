"""From a finished checkpoint in high precision to the codes that training multiplied, on a CPU."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from f8sub.convert.convert import convert_to_float8
from f8sub.errors import Float8ConfigError, Float8NumericsError
from f8sub.features.export import layouts
from f8sub.features.export.codes import blocks_of
from f8sub.features.export.float8_weights import Exported, examined
from f8sub.features.export.save import SHARD_BYTES, check_target, write
from f8sub.features.load.checkpoint import Checkpoint, DcpCheckpoint, some
from f8sub.formats import Float8Format
from f8sub.kernels.quantize import quantize
from f8sub.recipe import Recipe, get_recipe


def export_checkpoint(  # noqa: PLR0913  (what save_float8 takes, and where the checkpoint is)
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    *,
    recipe: Recipe | str,
    layout: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    prefix: str = "",
    config: Mapping[str, Any] | None = None,
    skip: tuple[str, ...] = (),
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Cast a checkpoint's linear weights once, as a forward in ``dtype`` with ``recipe`` does, and save the codes.

    Reads and casts one tensor at a time, on the CPU.

    Args:
        checkpoint: a folder of safetensors with ``config.json``, or of ``torch.distributed.checkpoint``.
        folder: to make, see ``save_float8``.
        model: what the checkpoint is of, on meta; it is converted in place.
        recipe: one whose weights are scaled by their current amax.
        layout: as in ``save_float8``.
        dtype: what the forward computes in: weights are rounded to it before they are cast.
        prefix: of the model's names in a checkpoint of ``torch.distributed.checkpoint``, such as "model.".
        config: for ``config.json``; None for the checkpoint's own.
        skip: more layers to leave in ``dtype``, see ``convert_to_float8``.
        shard_bytes: as in ``save_float8``.

    Returns:
        What was exported.

    Raises:
        Float8ConfigError: the recipe keeps histories, a layout that cannot hold its codes, or names that differ.
        Float8NumericsError: a weight is not finite.
        OSError: the folder could not be written; nothing of it is left.
    """
    recipe = get_recipe(recipe)
    if recipe.delayed is not None:
        raise Float8ConfigError(
            f"recipe {recipe.name!r} scales weights by amaxes of past steps, which a checkpoint of weights lacks; call "
            "f8sub.save_float8 where the model was trained"
        )
    source, target = Path(checkpoint), Path(folder)
    check_target(target)
    convert_to_float8(model, recipe=recipe, skip=skip)
    exported = examined(model, layout)
    is_dcp = (source / ".metadata").exists()
    opened = DcpCheckpoint(source, prefix) if is_dcp else Checkpoint(source)
    own = opened.config if isinstance(opened, Checkpoint) else {}
    wanted = {part.name for _, parts in blocks_of(model) for part in parts}
    names = [name for name in opened if name in wanted]
    if lacking := sorted(wanted - set(names)):
        raise Float8ConfigError(
            f"{source} lacks {some(lacking)}; is it of this model, and is prefix={prefix!r} right? It has "
            f"{some(sorted(opened))}"
        )
    tensors = _cast(opened, names, exported, dtype)
    written = {**own, **(config or {}), "dtype": str(dtype).removeprefix("torch.")}
    error = write(target, tensors, {**written, "quantization_config": exported.config(None)}, shard_bytes)
    if error is not None:
        raise error
    return exported


def _cast(
    opened: Checkpoint | DcpCheckpoint, names: list[str], exported: Exported, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        value = opened.read(name)
        fqn = name.removesuffix(".weight")
        format: Float8Format | None = exported.formats.get(fqn) if name.endswith(".weight") else None
        if format is None:
            yield name, value.to(dtype) if value.is_floating_point() else value
            continue
        if not bool(value.isfinite().all()):
            raise Float8NumericsError(
                f"{name} in the checkpoint has NaN or infinity, which an engine would serve"
            )
        operand = quantize(value.to(dtype), format, None).rowwise
        if operand is None:
            raise RuntimeError(f"{name}: quantize returned no rowwise operand for a rowwise format")
        for leaf, tensor in layouts.tensors_of(operand, exported.layout).items():
            yield f"{fqn}.{leaf}", tensor
