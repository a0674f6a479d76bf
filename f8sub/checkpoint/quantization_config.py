"""How a float8 checkpoint's tensors are to be read, by its names and its ``config.json``."""

import re
from collections.abc import Collection
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
)
"""Names of static scales of activations, which an engine casts by, and training does not.

Sources: the files of compressed-tensors and ModelOpt, transformers' ``FP8Linear``, FBGEMM's bound, and vLLM's
``maybe_remap_kv_scale_name`` for a cache of keys and values.
"""


class Source(NamedTuple):
    """A tensor of the checkpoint that a parameter, or a part of one, comes from.

    Attributes:
        piece: its name, and of what it is.
        scale: name of the scales; None for a tensor that is not in float8.
        tile: the block of elements that share a scale.
    """

    piece: Piece
    scale: str | None
    tile: Tile


def scale_of(name: str, checkpoint: Collection[str], config: dict[str, Any]) -> str:
    """The name of the scales of the codes ``name``.

    Args:
        name: of a weight's codes.
        checkpoint: names of all its tensors.
        config: what its ``config.json`` holds, which describes the codes.

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
    """Whether a tensor is a static scale of activations.

    Args:
        name: of the tensor.
        modules: names of the layers whose weights are float8, and of the modules that these are in.
    """
    module, _, leaf = name.rpartition(".")
    return leaf in _OF_ACTIVATIONS and module in modules


def tile_of(layer: str, config: dict[str, Any]) -> Tile:
    """The blocks of a layer's scales, as ``config.json`` says.

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
        return re.match(target[3:], layer) is not None
    return target in ("Linear", layer)
