"""Exports a finished checkpoint in high precision as the float8 data that training multiplied, on a CPU."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from f8sub.checkpoint import layouts
from f8sub.checkpoint.gathered import NamedTensor, blocks_of
from f8sub.checkpoint.names import Piece, other_names
from f8sub.checkpoint.reader import (
    Checkpoint,
    DcpCheckpoint,
    opened,
    prefix_of,
    some,
)
from f8sub.checkpoint.save import (
    SHARD_BYTES,
    as_json,
    check_target,
    config_of,
    warn_of_transformers,
    write,
)
from f8sub.checkpoint.stream import Exported, examined
from f8sub.convert.convert import convert_to_float8
from f8sub.errors import Float8ConfigError, Float8NumericsError, Float8ShapeError
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
    skip_defaults: bool = True,
    experts: bool = False,
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
        skip_defaults: as in ``convert_to_float8``; False for a training that had output heads and small layers in
            float8, too.
        experts: whether training multiplied experts in float8, as of ``convert_to_float8``.
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
    convert_to_float8(model, recipe=recipe, skip=skip, skip_defaults=skip_defaults, experts=experts)
    # On meta: shapes and formats say what is written, before anything is read.
    exported = examined(model, layout, dtype)
    warn_of_transformers(model, exported)
    with opened(source) as found:
        if "quantization_config" in found.config:
            raise Float8ConfigError(
                f"{source} is quantized already, says its config.json, and codes are cast from high precision"
            )
        sources = _matched(model, exported, found, source, prefix)
        written = {**config_of(model, dtype), **found.config, **(config or {})}
        written |= {"dtype": str(dtype).removeprefix("torch."), "quantization_config": exported.config(None)}
        tensors = _cast(found, sources, exported, dtype, progress)
        text = json.dumps(written, indent=2, sort_keys=True, default=as_json)
        error = write(target, tensors, text, shard_bytes)
    if error is not None:
        raise error
    return exported


class _StoredParameter(NamedTuple):
    """A parameter or buffer, or the matrix of one expert, with its place in the checkpoint.

    Attributes:
        part: the parameter.
        names: of the tensors in the checkpoint whose rows, one after the other, it is.
        pieces: what it is written as.
        expert: which expert's matrix is read of the first name, a tensor of all experts; None for the whole tensor.
    """

    part: NamedTensor
    names: tuple[str, ...]
    pieces: tuple[Piece, ...]
    expert: int | None = None


def _matched(
    model: torch.nn.Module,
    exported: Exported,
    found: Checkpoint | DcpCheckpoint,
    source: Path,
    prefix: str | None,
) -> list[_StoredParameter]:
    """Return the sources of all that is written, in the checkpoint's order, so that files are read once and forward."""
    there = set(found)
    parts = [part for _, parts in blocks_of(model) for part in parts]
    if prefix is None:
        prefix = prefix_of(sorted(there), [part.name for part in parts])
    others = other_names(model)
    sources, lacking = [], []
    for part in parts:
        pieces = exported.pieces[part.name]
        whole = [
            part.name,
            *others.get(part.name, ()),
            *(piece.name for piece in pieces if piece.expert is None),
        ]
        at = next((prefix + name for name in whole if prefix + name in there), None)
        if at is None and not all(prefix + piece.name in there for piece in pieces):
            lacking.append(part.name)
            continue
        # One source for a whole parameter, one for each expert of a stack: experts are cast one by one.
        if pieces[0].expert is None:
            sources.append(_StoredParameter(part, (at or part.name,), tuple(pieces)))
            continue
        for expert in dict.fromkeys(piece.expert for piece in pieces):
            own = sorted((p for p in pieces if p.expert == expert), key=lambda p: p.rows.start)  # type: ignore[union-attr]
            names = tuple(prefix + piece.name for piece in own) if at is None else (at,)
            sources.append(_StoredParameter(part, names, tuple(own), None if at is None else expert))
    if lacking:
        own_names = sorted(name.removeprefix(prefix) for name in there if name.startswith(prefix))
        raise Float8ConfigError(
            f"{source} lacks {some(sorted(lacking))}; is it of this model, and is prefix={prefix!r} right? It has "
            f"{some(own_names)}"
        )
    for each in sources:
        _check_shape(each, found)
    place = {name: index for index, name in enumerate(found)}
    return sorted(sources, key=lambda each: place[each.names[0]])


def _check_shape(source: _StoredParameter, found: Checkpoint | DcpCheckpoint) -> None:
    shape, shapes = tuple(source.part.tensor.shape), [found.shape_of(name) for name in source.names]
    of_parts = [shape]
    if source.pieces[0].expert is not None and source.expert is None:
        of_parts = [(p.rows.stop - p.rows.start, shape[2]) for p in source.pieces if p.rows is not None]
    if shapes != of_parts:
        raise Float8ShapeError(
            f"{source.part.name}: the model has {', '.join(map(str, of_parts))}, the checkpoint's "
            f"{', '.join(source.names)} has {', '.join(map(str, shapes))}"
        )


def _cast(
    found: Checkpoint | DcpCheckpoint,
    sources: list[_StoredParameter],
    exported: Exported,
    dtype: torch.dtype,
    progress: Callable[[Iterable[str]], Iterable[str]],
) -> Iterator[tuple[str, torch.Tensor]]:
    whole: dict[str, torch.Tensor] = {}  # the last one that experts are read of
    for at, source in zip(progress([source.names[0] for source in sources]), sources, strict=True):
        if source.expert is None:
            values = [found.read(name) for name in source.names]
            value = values[0] if len(values) == 1 else torch.cat(values)
        else:
            # A tensor of all experts is read once, and let go when the next one begins.
            whole = whole if at in whole else {at: found.read(at)}
            value = whole[at][source.expert]
        is_parameter = source.part.attribute in source.part.module._parameters
        if is_parameter and (not value.is_floating_point() or value.itemsize == 1):
            raise Float8ConfigError(
                f"{at} is {value.dtype} in the checkpoint; codes are cast from high precision"
            )
        pieces = source.pieces
        layer = pieces[0].name.removesuffix(".weight")
        format = exported.formats.get(layer) if pieces[0].name != layer else None
        # The order of training: round to the forward's dtype, then take the amax and cast.
        value = value.to(dtype) if is_parameter else value
        if format is None:
            for piece in pieces:
                yield piece.name, value if piece.rows is None else value[piece.rows].contiguous()
            continue
        if not bool(value.isfinite().all()):
            raise Float8NumericsError(
                f"{at} in the checkpoint has NaN or infinity, which an engine would serve"
            )
        operand = quantize(value, format, None).rowwise
        if operand is None:
            raise RuntimeError(f"{layer}: quantize returned no rowwise operand for a rowwise format")
        tensors = layouts.tensors_of(operand, exported.layout)
        for piece in pieces:
            for leaf, tensor in layouts.rows_of(tensors, piece.rows).items():
                yield piece.name.removesuffix("weight") + leaf, tensor
