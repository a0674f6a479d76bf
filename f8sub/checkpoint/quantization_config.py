"""Reads from a checkpoint's names and its ``config.json`` how its float8 tensors are to be read."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from f8sub.checkpoint.names import Piece
from f8sub.errors import Float8ConfigError
from f8sub.formats import ALL, Tile

_SCALES = ("weight_scale_inv", "weight_scale", "scale")
"""Names of a layer's scales. Sources: see ``layouts``; DeepSeek-V4's files have the last."""

_OF_ACTIVATIONS = (
    "input_scale",
    "activation_scale",
    "input_scale_ub",
    "output_scale",
    "q_scale",
    "k_scale",
    "v_scale",
    "kv_scale",
    "prob_scale",
)
"""Names of static scales of activations, which an engine casts by, and training does not.

Sources: the files of compressed-tensors and ModelOpt, transformers' ``FP8Linear``, FBGEMM's bound, and vLLM's
``maybe_remap_kv_scale_name`` for a cache of keys and values, with one scale of both in older files, and for attention's
probabilities.
"""


class StoredTensor(NamedTuple):
    """A tensor of the checkpoint that a parameter, or a part of one, comes from.

    Attributes:
        piece: its name, and the part of the parameter that it is.
        scale: name of the scales; None for a tensor that is not in float8.
        tile: the block of elements that share a scale.
    """

    piece: Piece
    scale: str | None
    tile: Tile


def scale_of(name: str, checkpoint: Collection[str], config: dict[str, Any]) -> str:
    """Return the name of the scales of the float8 weight ``name``.

    Args:
        name: of the weight.
        checkpoint: names of all its tensors.
        config: what its ``config.json`` holds, which describes float8.

    Raises:
        Float8ConfigError: there are none; it names what this file would call them.
    """
    prefix = name.removesuffix("weight")
    scale = next((prefix + leaf for leaf in _SCALES if prefix + leaf in checkpoint), None)
    if scale is not None:
        return scale
    by_method = _SCALES[config["quantization_config"]["quant_method"] == "compressed-tensors"]
    of_others = (leaf for leaf in _SCALES if any(other.endswith(f".{leaf}") for other in checkpoint))
    raise Float8ConfigError(
        f"{name} is float8, and the checkpoint has no scales of it: {prefix}{next(of_others, by_method)}"
    )


def is_of_activations(name: str, modules: Collection[str]) -> bool:
    """Return whether a tensor is a static scale of activations.

    Args:
        name: of the tensor.
        modules: names of the layers whose weights are float8, and of the modules that these are in.
    """
    module, _, leaf = name.rpartition(".")
    return leaf in _OF_ACTIVATIONS and module in modules


def tile_of(layer: str, config: dict[str, Any]) -> Tile:
    """Return the blocks of a layer's scales, as ``config.json`` describes them.

    Raises:
        Float8ConfigError: it says nothing, or something that f8sub does not read.
    """
    try:
        return _tile_of(layer, config.get("quantization_config") or {})
    except Float8ConfigError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, re.error) as error:
        raise Float8ConfigError(
            f"{layer}: its weight is float8, and the quantization_config in config.json is damaged, or one that "
            f"load_float8 does not know: {type(error).__name__}: {error}"
        ) from error


def _tile_of(layer: str, quantization: dict[str, Any]) -> Tile:
    method = quantization.get("quant_method")
    if method == "fp8":
        block = quantization.get("weight_block_size")
        return Tile(*block) if block else Tile(ALL, ALL)
    if method == "fbgemm_fp8":
        return Tile(1, ALL)
    if method == "modelopt" and quantization.get("quant_algo") == "FP8":
        return Tile(ALL, ALL)
    weights: dict[str, Any] = {}
    if method == "compressed-tensors":
        # The first group that names the layer: compressed-tensors' own order.
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
        f"{weights.get('strategy')!r}; load_float8 reads 'fp8', 'fbgemm_fp8', 'modelopt' of quant_algo 'FP8', and "
        "'compressed-tensors' of a tensor, channels, groups and blocks"
    )


def _targets(target: str, layer: str) -> bool:
    if target.startswith("re:"):
        # compressed-tensors matches patterns from the beginning of a name.
        return re.match(target[3:], layer) is not None
    return target in ("Linear", layer)


_CODES = {"num_bits": 8, "type": "float", "symmetric": True}
_FORMATS = ("float-quantized", "naive-quantized", "mxfp8-quantized", "mixed-precision")
"""compressed-tensors' arguments and formats of codes that are stored as they are, one a byte."""

_METHODS = ("fp8", "fbgemm_fp8", "modelopt", "compressed-tensors")


def refuse_other_methods(file: Path, config: dict[str, Any]) -> None:
    """Refuse a checkpoint that lacks weights and has a method that stores them under other names.

    Args:
        file: ``config.json``.
        config: what it holds.

    Raises:
        Float8ConfigError: it is, such as gpt-oss's MXFP4, whose tensors have names of their own.
    """
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method not in (None, *_METHODS):
        raise Float8ConfigError(
            f"{file}: the checkpoint is quantized by the method {method!r}, and load_float8 reads "
            f"{', '.join(_METHODS)}; where transformers dequantizes it, as gpt-oss with "
            "from_pretrained(..., quantization_config=Mxfp4Config(dequantize=True)), load it there and convert it"
        )


def described_tile(layer: str, file: Path, config: dict[str, Any]) -> Tile:
    """Return the blocks of a layer's scales, after checks that ``config.json`` describes e4m3.

    Args:
        layer: its weight is stored in e4m3.
        file: ``config.json``.
        config: what it holds.

    Raises:
        Float8ConfigError: it describes no blocks, or data of another kind, which e4m3 beside it cannot be.
    """
    try:
        tile = tile_of(layer, config)
    except Float8ConfigError as error:
        raise Float8ConfigError(f"{file}: {layer}: {str(error).removeprefix(f'{layer}: ')}") from error
    quantization = config["quantization_config"]
    group = _group_of(layer, quantization)
    weights = group.get("weights", {})
    wrong = [f"{key} {weights[key]!r}" for key, right in _CODES.items() if weights.get(key, right) != right]
    format = group.get("format") or quantization.get("format")
    if group and format not in (None, *_FORMATS):
        wrong.append(f"format {format!r}")
    # "fp8" says blocks by a key of its own.
    strategy = weights.get("strategy", "block" if quantization.get("weight_block_size") else None)
    edges = {"block": (tile.rows, tile.cols), "group": (tile.cols,)}.get(strategy, ())
    if ALL in edges:  # f8sub's own word for a whole dimension, and a slip in a file
        wrong.append(f"blocks of {tile.rows}x{tile.cols}")
    _refuse_rotations(file, quantization)
    if wrong:
        raise Float8ConfigError(
            f"{file}: {layer} is stored as F8_E4M3 and described with {', '.join(wrong)}; load_float8 reads num_bits "
            f"8, type 'float', symmetric True, the formats {', '.join(_FORMATS)}, and blocks of sizes from 1 on"
        )
    return tile


_ROTATED_WHILE_IT_RUNS = ("input", "output")
"""Places of compressed-tensors' transforms that a model without them lacks half of.

Those of keys and queries cancel in their product, and those of weights alone are a matter of the file. Source:
compressed-tensors' ``TransformLocation``.
"""


def _refuse_rotations(file: Path, quantization: dict[str, Any]) -> None:
    """Refuse weights that stand for the model's only after a rotation of activations, which training does not do."""
    # Of the first weight that is read: rotations hold for a whole model.
    schemes = ((quantization.get("transform_config") or {}).get("config_groups") or {}).values()
    places = {args.get("location") for scheme in schemes for args in scheme.get("apply") or ()}
    found = [place for place in _ROTATED_WHILE_IT_RUNS if place in places]
    if found:
        raise Float8ConfigError(
            f"{file}: transform_config rotates each {' and '.join(found)} of layers while the model runs, so their "
            "weights are rotated too, and without that they are another model's; load a checkpoint without online "
            "rotations, such as the one in high precision, and convert it"
        )


def _group_of(layer: str, quantization: dict[str, Any]) -> dict[str, Any]:
    """Return the group of compressed-tensors that describes a layer; {} for another method."""
    if quantization["quant_method"] != "compressed-tensors":
        return {}
    for name, group in quantization["config_groups"].items():
        try:
            tile_of(layer, {"quantization_config": {**quantization, "config_groups": {name: group}}})
        except Float8ConfigError:
            continue
        found: dict[str, Any] = group
        return found
    return {}
