"""The blocks of e4m3 codes by a checkpoint's ``config.json``, which must describe such codes."""

from pathlib import Path
from typing import Any

from f8sub.checkpoint.quantization_config import tile_of
from f8sub.errors import Float8ConfigError
from f8sub.formats import ALL, Tile

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
    """The blocks of a layer's scales.

    Args:
        layer: its weight is stored in e4m3.
        file: ``config.json``.
        config: what it holds.

    Raises:
        Float8ConfigError: it describes no blocks, or codes of another kind, which e4m3 codes beside it cannot be.
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
    strategy = weights.get("strategy", "block" if quantization.get("weight_block_size") else None)
    edges = {"block": (tile.rows, tile.cols), "group": (tile.cols,)}.get(strategy, ())
    if ALL in edges:  # f8sub's own word for a whole dimension, and a slip in a file
        wrong.append(f"blocks of {tile.rows}x{tile.cols}")
    if wrong:
        raise Float8ConfigError(
            f"{file}: {layer} is stored as F8_E4M3 and described with {', '.join(wrong)}; load_float8 reads num_bits "
            f"8, type 'float', symmetric True, the formats {', '.join(_FORMATS)}, and blocks of sizes from 1 on"
        )
    return tile


def _group_of(layer: str, quantization: dict[str, Any]) -> dict[str, Any]:
    """The group of compressed-tensors that describes a layer; an empty one of another method."""
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
