"""Names, shapes and descriptions of float8 weights on disk, as inference engines have them.

| layout | tensors beside ``LAYER.`` | shape, dtype | formats |
| --- | --- | --- | --- |
| fp8 | ``weight``; ``weight_scale_inv`` | e4m3 (N, K); float32 (N / 128, K / 128), rounded up | squares |
| compressed-tensors, channel | ``weight``; ``weight_scale`` | e4m3 (N, K); float32 (N, 1) | a row, a tensor |
| compressed-tensors, block | ``weight``; ``weight_scale`` | as fp8's | squares |
| compressed-tensors, mxfp8 | ``weight``; ``weight_scale`` | e4m3 (N, K); uint8 exponents (N, K / 32) | 1x32 e8m0 |

Every scale multiplies the data. Sources: transformers' ``FineGrainedFP8Config`` and the ``Fp8Config`` of vLLM and
SGLang, which read the first; compressed-tensors' ``QuantizationConfig`` for the others.

Readers do some layouts otherwise than training, or not at all.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from f8sub.convert.products import kinds
from f8sub.errors import Float8ConfigError, Float8Warning, first_and_more, unknown
from f8sub.formats import ALL, Float8Format, Operand, ScaleRule, Tile

FP8, COMPRESSED = LAYOUTS = ("fp8", "compressed-tensors")

BLOCK = 128
"""Edge of the squares that engines read. Source: vLLM's ``validate_fp8_block_shape`` and its DeepGEMM kernels."""

_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}


class Scheme(NamedTuple):
    """Describes one group of layers in compressed-tensors' configuration.

    Attributes:
        format: compressed-tensors' name of the storage.
        weights: its arguments for the weights.
        inputs: its arguments for the inputs, which an engine quantizes itself.
    """

    format: str
    weights: dict[str, Any]
    inputs: dict[str, Any]


CHANNEL = Scheme(
    "float-quantized",
    {**_FLOAT8, "strategy": "channel", "dynamic": False},
    {**_FLOAT8, "strategy": "token", "dynamic": True},
)
_BLOCK = Scheme(
    "float-quantized",
    {**_FLOAT8, "strategy": "block", "block_structure": [BLOCK, BLOCK], "dynamic": False},
    {**_FLOAT8, "strategy": "group", "group_size": BLOCK, "dynamic": True},
)
_MXFP8 = Scheme(
    "mxfp8-quantized",
    {**_FLOAT8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "dynamic": False},
    {**_FLOAT8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "dynamic": True},
)


def scheme_of(format: Float8Format) -> Scheme | None:
    """Return the scheme of compressed-tensors that holds a format; None where none does."""
    if format.dtype != torch.float8_e4m3fn or format.hadamard is not None:
        return None
    if format.scale_rule is ScaleRule.E8M0:
        return _MXFP8 if format.tile == Tile(1, 32) else None
    if not format.is_plain:
        return None
    if format.tile.cols == ALL and format.tile.rows in (1, ALL):
        return CHANNEL
    return _BLOCK if _is_square(format) else None


def why_not(layout: str, format: Float8Format, shape: tuple[int, int]) -> str | None:
    """Return why a layout cannot hold a weight of ``shape`` (N, K); None where it can."""
    if scheme_of(format) is None:
        if format.scale_rule.has_global:
            return (
                f"{format}: engines multiply NVFP4 with a static scale of the inputs, which training has not, and with "
                "one global scale for weights that they fuse (q, k, v); save such a model in bfloat16"
            )
        return f"engines read e4m3 with scales of a tensor, a row, squares of {BLOCK}s or 1x32 (e8m0), not {format}"
    if layout == FP8 and not _is_square(format):
        return f"it holds squares of {BLOCK}, not {format}"
    # transformers takes rows // rows of scales for the edge of a block, and reads another weight without a word.
    guessed = all(extent % -(-extent // BLOCK) == 0 for extent in shape)
    if layout == FP8 and guessed and not _is_aligned(shape):
        return f"readers guess the edge of a block from the shape, which {shape[0]}x{shape[1]} misleads"
    return None


def _is_aligned(shape: tuple[int, int]) -> bool:
    return not any(extent % BLOCK for extent in shape)


def natural_layout(weights: Mapping[str, tuple[Float8Format, tuple[int, int]]]) -> str:
    """Return the layout that most readers read, of those that hold all the weights: formats and shapes by layer."""
    fits = all(why_not(FP8, *weight) is None and _is_aligned(weight[1]) for weight in weights.values())
    return FP8 if fits else COMPRESSED


def check(layout: str, weights: Mapping[str, tuple[Float8Format, tuple[int, int]]]) -> None:
    """Check that a layout holds all the weights.

    Raises:
        Float8ConfigError: it does not, or there is no such layout.
    """
    if layout not in LAYOUTS:
        raise unknown("layout", layout, ["auto", *LAYOUTS])
    reasons: dict[str, list[str]] = {}
    for fqn, weight in weights.items():
        if (reason := why_not(layout, *weight)) is not None:
            # One reason with all of its layers, not a line for each.
            reasons.setdefault(reason, []).append(fqn)
    if reasons:
        listed = "; ".join(f"{', '.join(kinds(fqns))}: {reason}" for reason, fqns in reasons.items())
        is_held = all(why_not(COMPRESSED, *weight) is None for weight in weights.values())
        other = " Try layout='compressed-tensors'." if is_held else ""
        raise Float8ConfigError(f"layout {layout!r} cannot hold these layers. {listed}.{other}")
    unaligned = [fqn for fqn, (_, shape) in weights.items() if layout == FP8 and not _is_aligned(shape)]
    if unaligned:
        warnings.warn(
            f"{first_and_more(unaligned)}: dimensions that {BLOCK} does not divide, as DeepSeek-V3's own checkpoint "
            "has; vLLM and SGLang read them, and transformers refuses the checkpoint",
            Float8Warning,
            stacklevel=5,
        )


def tensors_of(operand: Operand, layout: str) -> dict[str, torch.Tensor]:
    """Return one layer's tensors by their names in a layout.

    The quantized data are ``operand``'s own. A scale of a whole tensor is repeated for each row, since engines that
    fuse q, k and v quantize weights of one scale a second time.
    """
    rows, _ = operand.shape
    if layout == FP8:
        return {"weight": operand.data, "weight_scale_inv": _grid(operand)}
    if operand.format.scale_rule is ScaleRule.E8M0:
        # e8m0 is stored as the exponent's byte: safetensors' readers know no such dtype.
        return {"weight": operand.data, "weight_scale": operand.scale_inv.view(torch.uint8)}
    if operand.format.tile.cols == ALL:
        return {"weight": operand.data, "weight_scale": operand.scale_inv.expand(rows, 1).contiguous()}
    return {"weight": operand.data, "weight_scale": _grid(operand)}


def rows_of(tensors: dict[str, torch.Tensor], rows: slice | None) -> dict[str, torch.Tensor]:
    """Return some rows of a layer's tensors, in memory of their own; None for all, as they are."""
    if rows is None:
        return tensors
    whole = len(tensors["weight"])
    # Scales per row are cut as the rows are; those of blocks, which are fewer, by the block.
    blocks = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
    parts = {leaf: tensor[rows if len(tensor) == whole else blocks] for leaf, tensor in tensors.items()}
    return {leaf: part.clone(memory_format=torch.contiguous_format) for leaf, part in parts.items()}


def check_rows(layer: str, format: Float8Format, rows: slice | None) -> None:
    """Check that rows of a matrix, such as an expert's up of its gate and up, have scales of their own on disk.

    Raises:
        Float8ConfigError: they begin within a block.
    """
    if rows is not None and format.tile.rows not in (1, ALL) and rows.start % BLOCK:
        raise Float8ConfigError(
            f"{layer}: it is rows from {rows.start} on of a weight with blocks of {BLOCK}, so that it shares scales "
            "with the layer before it, and no checkpoint holds that; train with a recipe that has scales of rows"
        )


def quantization_config(
    layout: str, formats: Mapping[str, Float8Format], in_high_precision: Sequence[str]
) -> dict[str, Any]:
    """Return the ``quantization_config`` of a ``config.json``.

    Args:
        layout: one of ``LAYOUTS``.
        formats: of the float8 layers, by full name.
        in_high_precision: full names of the linear layers that are not in float8.
    """
    ignored = sorted(in_high_precision)
    if layout == FP8:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "scale_fmt": "float",
            "modules_to_not_convert": ignored,
        }
    schemes: list[tuple[Scheme, list[str]]] = []
    for fqn, format in formats.items():
        scheme = scheme_of(format)
        if scheme is None:
            raise Float8ConfigError(f"{fqn}: {why_not(layout, format, (0, 0))}")
        # By identity: there is one object for each scheme.
        of_scheme = next((fqns for known, fqns in schemes if known is scheme), None)
        if of_scheme is None:
            schemes.append((scheme, [fqn]))
        else:
            of_scheme.append(fqn)
    groups = {
        f"group_{index}": {
            # One group for all is what compressed-tensors writes itself, and engines need not match names.
            "targets": ["Linear"] if len(schemes) == 1 else sorted(fqns),
            "weights": scheme.weights,
            "input_activations": scheme.inputs,
            "output_activations": None,
            "format": scheme.format,
        }
        for index, (scheme, fqns) in enumerate(schemes)
    }
    formats_of_groups = {scheme.format for scheme, _ in schemes}
    return {
        "quant_method": "compressed-tensors",
        "format": formats_of_groups.pop() if len(formats_of_groups) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": ignored,
        "config_groups": groups,
        "kv_cache_scheme": None,
    }


def _is_square(format: Float8Format) -> bool:
    tile = format.tile
    return format.is_plain and tile.rows == tile.cols and tile.rows > 0 and tile.rows % BLOCK == 0


def _grid(operand: Operand) -> torch.Tensor:
    """Repeat scales of squares for every square of ``BLOCK`` in them: float32, (N / 128, K / 128), rounded up."""
    times = operand.format.tile.rows // BLOCK
    down, across = (-(-extent // BLOCK) for extent in operand.shape)
    # A 256x256 square is four blocks of 128 with one scale: the file repeats it, and nothing is rounded again.
    grid = operand.scale_inv.repeat_interleave(times, 0).repeat_interleave(times, 1)
    return grid[:down, :across].contiguous()


_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one parent that engines multiply as one. Source: vLLM's ``packed_modules_mapping`` of Llama and Qwen."""

_MADE_ANEW = "Llama4TextExperts"
"""Experts that transformers makes layers of for compressed-tensors. Source: ``MODULES_TO_PATCH_FOR_QUANTIZATION``."""


def unread_by_transformers(
    formats: Mapping[str, Float8Format], of_experts: Sequence[str], classes: Collection[str]
) -> str | None:
    """Return what transformers 5.23 cannot read in the layout of compressed-tensors; None where it reads all.

    Source: ``CompressedTensorsDequantize`` of its integration, which multiplies experts' data by their scales as they
    are, and reads all layers by the first group.

    Args:
        formats: of the float8 layers, by full name.
        of_experts: which of them are experts'.
        classes: names of the classes of the model's modules.
    """
    if _MADE_ANEW in classes:
        return (
            f"{_MADE_ANEW} stay in high precision, with all experts in one tensor: for compressed-tensors transformers "
            "5.23 makes a layer of each expert, finds none in the checkpoint, and begins them anew or fails. It reads "
            "layout='fp8', which holds blockwise; f8sub.load_float8 reads both"
        )
    if layers := [fqn for fqn in of_experts if scheme_of(formats[fqn]) is not CHANNEL]:
        return (
            f"{first_and_more(layers)}: experts with scales of blocks or groups. compressed-tensors holds them, and "
            "transformers 5.23 fails to read them. It reads experts with scales of rows, and those of blocks where "
            "layout='fp8' can be had"
        )
    schemes = {scheme.format + str(scheme.weights) for scheme in map(scheme_of, formats.values()) if scheme}
    if len(schemes) > 1:
        return (
            f"these layers have {len(schemes)} formats, each a group of compressed-tensors: transformers 5.23 reads "
            "them, but not with CompressedTensorsConfig(dequantize=True), as a CPU needs it"
        )
    return None


def warn_of_engines(
    formats: Mapping[str, Float8Format], others: Sequence[str], parameters: Sequence[str]
) -> None:
    """Warn of what engines quantize again, refuse or leave out.

    Args:
        formats: of the float8 layers, by full name.
        others: full names of the other linear layers.
        parameters: names of all that is exported.
    """
    floats = [
        fqn
        for fqn, f in formats.items()
        if f.scale_rule is ScaleRule.FLOAT and f.tile.rows == f.tile.cols > 0
    ]
    if floats:
        warnings.warn(
            f"{first_and_more(floats)}: scales of blocks that are no powers of two. vLLM (with DeepGEMM) and SGLang "
            "(on Blackwell) cast such weights again, which doubles float8's error; train with a recipe whose scales of "
            "blocks are powers of two, which stay as they are",
            Float8Warning,
            stacklevel=4,
        )
    if adapters := [name for name in parameters if ".lora_" in name]:
        warnings.warn(
            f"{first_and_more(adapters)}: adapters that are not merged. Engines read neither them nor the "
            "names that PEFT gives the base: call f8sub.restore_high_precision(model), where its values were dropped, "
            "and model.merge_and_unload()",
            Float8Warning,
            stacklevel=4,
        )
    parents = {fqn.rpartition(".")[0] for fqn in formats}
    for parent, group in ((parent, group) for parent in sorted(parents) for group in _FUSED):
        names = [f"{parent}.{leaf}" for leaf in group]
        missing = [name for name in names if name in others]
        if missing and any(name in formats for name in names):
            warnings.warn(
                f"{', '.join(missing)}: not in float8, while its siblings are; vLLM multiplies "
                f"{', '.join(group)} as one layer and refuses such a checkpoint. Convert all of them, or none",
                Float8Warning,
                stacklevel=4,
            )
            return
