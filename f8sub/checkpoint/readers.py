"""What readers of checkpoints do not do with one, or do otherwise than training."""

import warnings
from collections.abc import Collection, Mapping, Sequence

from f8sub.checkpoint.layouts import CHANNEL, scheme_of
from f8sub.errors import Float8Warning
from f8sub.formats import Float8Format, ScaleRule

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one parent that engines multiply as one. Source: vLLM's ``packed_modules_mapping`` of Llama and Qwen."""

_MADE_ANEW = "Llama4TextExperts"
"""Experts that transformers makes layers of for compressed-tensors. Source: ``MODULES_TO_PATCH_FOR_QUANTIZATION``."""


def unread_by_transformers(
    formats: Mapping[str, Float8Format], of_experts: Sequence[str], classes: Collection[str]
) -> str | None:
    """What transformers 5.23 cannot read of a model in the layout of compressed-tensors; None where it reads all.

    Source: ``CompressedTensorsDequantize`` of its integration, which multiplies experts' codes by their scales as they
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
            f"{layers[0]} and {len(layers) - 1} more experts have scales of blocks or groups: compressed-tensors holds "
            "them, and transformers 5.23 fails to read them. It reads experts with scales of rows, and those of blocks "
            "where layout='fp8' can be had"
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
    """Warn of what engines cast anew, refuse or leave out.

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
            f"{floats[0]} and {len(floats) - 1} more layers have scales of blocks that are no powers of two. vLLM "
            "(with DeepGEMM) and SGLang (on Blackwell) cast such weights anew, which doubles float8's error; train "
            "with a recipe whose scales of blocks are powers of two, which stay as they are",
            Float8Warning,
            stacklevel=4,
        )
    if adapters := [name for name in parameters if ".lora_" in name]:
        warnings.warn(
            f"{adapters[0]} and {len(adapters) - 1} more adapters are not merged, and engines read neither them nor "
            "the names that PEFT gives the base: call f8sub.restore_high_precision(model), where its values were "
            "dropped, and model.merge_and_unload()",
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
