"""load_float8: start from a float8 checkpoint, such as Qwen3-FP8 or DeepSeek-V3: values for masters, shard by shard."""

import os
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from f8sub.errors import Float8ConfigError, Float8ShapeError, Float8Warning
from f8sub.features.export.codes import Part, blocks_of, float8_format, unwrapped
from f8sub.features.export.float8_weights import Rename
from f8sub.features.load.checkpoint import Checkpoint, some
from f8sub.features.load.ties import other_names
from f8sub.formats import ALL, Tile
from f8sub.linear import sockets
from f8sub.linear.float8_linear import Float8Linear
from f8sub.torch_compat import is_dtensor
from f8sub.weights.weight import local_tensor

_SCALES = ("weight_scale_inv", "weight_scale", "scale")
"""Names of a layer's scales. Sources: see ``layouts``; DeepSeek-V4's files have the last."""

_HIGH_PRECISION = ("F64", "F32", "F16", "BF16")
"""safetensors' names of what a parameter is read from without scales."""

_SECOND_CAST = 0.026
"""Relative error of values that are cast to e4m3 twice with scales of different rules, which is that of one cast.

Measured on published 128x128 weights with float32 scales, cast again with powers of two.
"""


class _Source(NamedTuple):
    """Where a parameter comes from.

    Attributes:
        name: of the values or codes in the checkpoint.
        scale: name of the scales; None for a tensor that is not in float8.
        tile: the block of elements that share a scale.
    """

    name: str
    scale: str | None
    tile: Tile


def load_float8(
    model: torch.nn.Module,
    folder: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    strict: bool = True,
) -> None:
    """Fill a model from a checkpoint whose linear weights are float8 codes and scales.

    Each rank reads its own shards, one tensor at a time; nothing is sent. Call it before or after ``fully_shard``, and
    ``precompute_scales`` after it. Everything is checked before the first value is written.

    A converted layer whose recipe has the file's tiles and powers of two as scales multiplies the file's values
    exactly. Any other casts them once more, with a ``Float8Warning``.

    Args:
        model: converted or not, on a device.
        folder: with ``config.json`` and ``model.safetensors``, or an index and its files, of the layouts that
            ``save_float8`` writes: ``quant_method`` fp8 or compressed-tensors.
        rename: from a parameter's name in the model to the checkpoint's.
        strict: raise where the model and the checkpoint have different names; False leaves what is missing as it is.

    Raises:
        Float8ConfigError: no such checkpoint, a file cut short, another layout, or names that differ.
        Float8ShapeError: a tensor or its scales have another shape.
    """
    with Checkpoint(Path(folder)) as checkpoint:
        parts = [part for _, parts in blocks_of(unwrapped(model)) for part in parts]
        if on_meta := [part.name for part in parts if local_tensor(_tensor(part)).is_meta]:
            raise Float8ConfigError(
                f"{some(on_meta)} on meta, which has no memory for values; call model.to_empty(device=...) first"
            )
        sources = _matched(parts, checkpoint, _Names(rename or str, other_names(unwrapped(model))), strict)
        for part, source in sources.items():
            _check_shapes(part, source, checkpoint)
        conversions = {part.module.converted for part in sources if isinstance(part.module, Float8Linear)}
        for conversion in conversions:
            conversion.settle()
        again = []
        for part, source in sources.items():
            values, is_power_of_2 = _values(part, source, checkpoint)
            with torch.no_grad():
                local_tensor(_tensor(part)).copy_(values)
            if part.is_float8 and source.scale is not None and not _keeps(part, source, is_power_of_2):
                again.append(part.fqn)
        for conversion in conversions:
            conversion.loaded()
        for part in sources:
            if isinstance(part.module, Float8Linear):
                for guest in sockets.guests:  # as of a state dict that has this parameter alone
                    guest.loaded(part.module, {part.attribute: _tensor(part)}, "")
    if again:
        warnings.warn(
            f"{again[0]} and {len(again) - 1} more layers: the checkpoint's scales are of other blocks, or of another "
            f"rule, than the recipe's, so the weights are cast to float8 a second time, {_SECOND_CAST} off (relative). "
            "Convert with a recipe whose weights have the checkpoint's blocks and its kind of scales",
            Float8Warning,
            stacklevel=2,
        )


def _tensor(part: Part) -> torch.Tensor:
    tensor: torch.Tensor = getattr(part.module, part.attribute)
    return tensor


class _Names(NamedTuple):
    """What the checkpoint may call a parameter: ``rename`` of its name or of one it is tied to."""

    rename: Rename
    others: dict[str, list[str]]

    def of(self, name: str) -> list[str]:
        return [self.rename(each) for each in (name, *self.others.get(name, ()))]


def _matched(parts: list[Part], checkpoint: Checkpoint, names: _Names, strict: bool) -> dict[Part, _Source]:
    """The source of every parameter; those of the checkpoint that are left, or missing, are an error if ``strict``."""
    found: dict[Part, _Source] = {}
    missing = []
    used: set[str] = set()
    for part in parts:
        there = [name for name in names.of(part.name) if name in checkpoint]
        if not there:
            missing.append(names.rename(part.name))
            continue
        scales = [_scale_of(name, part, checkpoint) for name in there]
        name, scale = there[0], scales[0]
        tile = Tile(ALL, ALL) if scale is None else _tile_of(name.removesuffix(".weight"), checkpoint.config)
        found[part] = _Source(name, scale, tile)
        used |= {*there, *(scale for scale in scales if scale is not None)}
    unused = sorted(name for name in checkpoint if name not in used)
    if strict and (missing or unused):
        raise Float8ConfigError(
            f"the checkpoint lacks {some(missing)} and has {some(unused)}, which the model has not; give rename=, "
            "or strict=False to load what both have"
        )
    return found


def _scale_of(name: str, part: Part, checkpoint: Checkpoint) -> str | None:
    """The name of a tensor's scales; None of one in high precision.

    Raises:
        Float8ConfigError: it has none, or is of a dtype that is no number without something else.
    """
    dtype = checkpoint.slice_of(name).get_dtype()
    if dtype != "F8_E4M3":
        if _tensor(part).is_floating_point() and dtype not in _HIGH_PRECISION:
            raise Float8ConfigError(
                f"{name} is stored as {dtype}, which load_float8 does not read; it reads F8_E4M3 with scales, and "
                f"{', '.join(_HIGH_PRECISION)}"
            )
        return None
    prefix = name.removesuffix("weight")
    scale = next((prefix + leaf for leaf in _SCALES if prefix + leaf in checkpoint), None)
    if scale is None:
        raise Float8ConfigError(f"{name} is float8, and the checkpoint has no scales: {prefix}{_SCALES[0]}")
    return scale


def _tile_of(layer: str, config: dict[str, Any]) -> Tile:
    """The blocks of a layer's scales, as ``config.json`` says.

    Raises:
        Float8ConfigError: it says nothing, or something that f8sub does not read.
    """
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method == "fp8":
        block = quantization.get("weight_block_size")
        return Tile(*block) if block else Tile(ALL, ALL)
    weights: dict[str, Any] = {}
    if method == "compressed-tensors":
        groups = quantization.get("config_groups", {}).values()
        weights = next(
            (g.get("weights") or {} for g in groups if any(_targets(t, layer) for t in g["targets"])), {}
        )
    match weights.get("strategy"):
        case "tensor":
            return Tile(ALL, ALL)
        case "channel":
            return Tile(1, ALL)
        case "group":
            return Tile(1, int(weights["group_size"]))
        case "block":
            return Tile(*weights["block_structure"])
    raise Float8ConfigError(
        f"{layer}: its weight is float8, and config.json describes it as quant_method {method!r}, strategy "
        f"{weights.get('strategy')!r}; load_float8 reads 'fp8', and 'compressed-tensors' of a tensor, channels, groups "
        "and blocks"
    )


def _targets(target: str, layer: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], layer) is not None
    return target in ("Linear", layer)


def _check_shapes(part: Part, source: _Source, checkpoint: Checkpoint) -> None:
    shape, found = tuple(_tensor(part).shape), tuple(checkpoint.slice_of(source.name).get_shape())
    if found != shape:
        raise Float8ShapeError(
            f"{part.name}: the model has {shape}, the checkpoint's {source.name} has {found}"
        )
    if source.scale is None:
        return
    if len(shape) != 2:
        raise Float8ShapeError(
            f"{part.name}: {source.name} is float8 of {len(shape)} dimensions; matrices are read"
        )
    expected, scales = (
        source.tile.scale_shape((shape[0], shape[1])),
        checkpoint.slice_of(source.scale).get_shape(),
    )
    if source.tile.is_whole and tuple(scales) in ((), (1,)):
        return
    if tuple(scales) != expected:
        raise Float8ShapeError(
            f"{part.name}: a weight of {shape} with scales of {source.tile} has {expected} of them, and the "
            f"checkpoint's {source.scale} has {tuple(scales)}; its config.json tells another block size than it was "
            "made with"
        )


def _values(part: Part, source: _Source, checkpoint: Checkpoint) -> tuple[torch.Tensor, bool]:
    """This rank's part of a tensor, dequantized, and whether its scales are powers of two."""
    where = _local_slices(_tensor(part))
    stored = checkpoint.slice_of(source.name)
    if source.scale is None:
        return (stored[where] if where else stored[...]), True
    codes = stored[where]
    scales = checkpoint.slice_of(source.scale)[...]
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    scales = scales.float()
    is_power_of_2 = bool(((scales.view(torch.int32) & 0x7FFFFF) == 0).all())
    if source.tile.is_whole:
        return codes.float() * scales.view(1, 1), is_power_of_2
    for dim, (edge, at) in enumerate(zip((source.tile.rows, source.tile.cols), where, strict=True)):
        if edge == ALL:
            continue
        tiles = torch.arange(at.start, at.stop, dtype=torch.int64, device="cpu") // edge
        scales = scales.index_select(dim, tiles)
    return codes.float() * scales, is_power_of_2


def _keeps(part: Part, source: _Source, is_power_of_2: bool) -> bool:
    """Whether the layer's own cast has the values of the checkpoint's codes."""
    format = float8_format(part.module)
    return (
        format is not None
        and format.tile == source.tile
        and format.dtype == torch.float8_e4m3fn
        and format.scale_rule.is_power_of_2
        and is_power_of_2
    )


def _local_slices(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Where this rank's part of a DTensor lies in the whole; all of any other tensor."""
    if not is_dtensor(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    mesh, placements = tensor.device_mesh, tensor.placements
    place_of = torch.distributed.tensor._utils.compute_local_shape_and_global_offset
    shape, offset = place_of(tensor.shape, mesh, placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
