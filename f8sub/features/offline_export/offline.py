"""From a finished checkpoint in high precision to the codes that training multiplied, on a CPU."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from f8sub.convert.convert import convert_to_float8
from f8sub.errors import Float8ConfigError, Float8NumericsError, Float8ShapeError
from f8sub.features.export.codes import blocks_of
from f8sub.features.export.float8_weights import Exported, examined
from f8sub.features.export.save import SHARD_BYTES, check_target, config_of, write
from f8sub.features.layouts import layouts
from f8sub.features.load.checkpoint import Checkpoint, DcpCheckpoint, opened, prefix_of, some
from f8sub.features.load.ties import other_names
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
    prefix: str | None = None,
    config: Mapping[str, Any] | None = None,
    skip: tuple[str, ...] = (),
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> Exported:
    """Cast a checkpoint's linear weights once, as a forward in ``dtype`` with ``recipe`` does, and save the codes.

    Reads and casts one tensor at a time, on the CPU.

    Args:
        checkpoint: a folder of safetensors, or of ``torch.distributed.checkpoint``.
        folder: to make, see ``save_float8``.
        model: what the checkpoint is of, on meta; it is converted in place.
        recipe: one whose weights are scaled by their current amax.
        layout: as in ``save_float8``.
        dtype: what the forward computes in: weights are rounded to it before they are cast. Buffers keep theirs.
        prefix: of the model's names in the checkpoint, such as "model."; None where the names tell it.
        config: for ``config.json``; None for the checkpoint's own, or else that of ``model.config``.
        skip: more layers to leave in ``dtype``, see ``convert_to_float8``.
        shard_bytes: as in ``save_float8``.
        progress: given the names of the tensors, it returns them again; to show how far it is.

    Returns:
        What was exported.

    Raises:
        Float8ConfigError: the recipe keeps histories, a layout that cannot hold its codes, a checkpoint that is
            damaged or in float8 already, or names that differ.
        Float8ShapeError: a tensor has another shape than the model's.
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
    with opened(source) as found:
        if "quantization_config" in found.config:
            raise Float8ConfigError(
                f"{source} is quantized already, says its config.json, and codes are cast from high precision"
            )
        names = _matched(model, found, source, prefix)
        written = {**config_of(model, dtype), **found.config, **(config or {})}
        written |= {"dtype": str(dtype).removeprefix("torch."), "quantization_config": exported.config(None)}
        tensors = _cast(found, names, exported, dtype, progress)
        text = json.dumps(written, indent=2, sort_keys=True, default=str)
        error = write(target, tensors, text, shard_bytes)
    if error is not None:
        raise error
    return exported


def _matched(
    model: torch.nn.Module, found: Checkpoint | DcpCheckpoint, source: Path, prefix: str | None
) -> dict[str, tuple[str, bool]]:
    """The model's names by the checkpoint's: with each whether it is a parameter."""
    there = set(found)
    parts = {part.name: part for _, parts in blocks_of(model) for part in parts}
    if prefix is None:
        prefix = prefix_of(sorted(there), list(parts))
    others = other_names(model)
    where = {
        name: next((prefix + each for each in (name, *others.get(name, ())) if prefix + each in there), None)
        for name in parts
    }
    if lacking := sorted(name for name, at in where.items() if at is None):
        own = sorted(name.removeprefix(prefix) for name in there if name.startswith(prefix))
        raise Float8ConfigError(
            f"{source} lacks {some(lacking)}; is it of this model, and is prefix={prefix!r} right? It has {some(own)}"
        )
    matched: dict[str, tuple[str, bool]] = {}
    for name, at in where.items():
        tensor = getattr(parts[name].module, parts[name].attribute)
        shape, shape_there = tuple(tensor.shape), found.shape_of(at or name)
        if shape != shape_there:
            raise Float8ShapeError(f"{name}: the model has {shape}, the checkpoint's {at} has {shape_there}")
        matched[at or name] = name, isinstance(tensor, torch.nn.Parameter)
    return matched


def _cast(
    found: Checkpoint | DcpCheckpoint,
    names: Mapping[str, tuple[str, bool]],
    exported: Exported,
    dtype: torch.dtype,
    progress: Callable[[Iterable[str]], Iterable[str]],
) -> Iterator[tuple[str, torch.Tensor]]:
    # In the checkpoint's order, so that files are read once and forward.
    for at in progress([at for at in found if at in names]):
        value, (name, is_parameter) = found.read(at), names[at]
        if is_parameter and (not value.is_floating_point() or value.itemsize == 1):
            raise Float8ConfigError(
                f"{at} is {value.dtype} in the checkpoint; codes are cast from high precision"
            )
        fqn = name.removesuffix(".weight")
        format: Float8Format | None = exported.formats.get(fqn) if name.endswith(".weight") else None
        if format is None:
            yield name, value.to(dtype) if is_parameter else value
            continue
        value = value.to(dtype)
        if not bool(value.isfinite().all()):
            raise Float8NumericsError(
                f"{at} in the checkpoint has NaN or infinity, which an engine would serve"
            )
        operand = quantize(value, format, None).rowwise
        if operand is None:
            raise RuntimeError(f"{name}: quantize returned no rowwise operand for a rowwise format")
        for leaf, tensor in layouts.tensors_of(operand, exported.layout).items():
            yield f"{fqn}.{leaf}", tensor
