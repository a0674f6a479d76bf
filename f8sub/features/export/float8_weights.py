"""The weights of a model as an inference engine loads them: streamed, or as a state dict."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from f8sub.errors import Float8ConfigError, Float8Warning
from f8sub.features.export import layouts
from f8sub.features.export.codes import Part, blocks_of, float8_format, operand_of, unwrapped
from f8sub.formats import Float8Format, ScaleRule
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import is_dtensor
from f8sub.weights.weight import Weight

Rename = Callable[[str], str]
"""From a parameter's name in the model to the engine's."""

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one parent that engines multiply as one. Source: vLLM's ``packed_modules_mapping`` of Llama and Qwen."""


class Exported(NamedTuple):
    """What is exported of a model.

    Attributes:
        layout: one of ``layouts.LAYOUTS``.
        formats: of the float8 layers, by full name.
        in_high_precision: full names of the other linear layers.
    """

    layout: str
    formats: dict[str, Float8Format]
    in_high_precision: list[str]

    def config(self, rename: Rename | None) -> dict[str, Any]:
        """``quantization_config`` of a ``config.json``."""

        def named(fqn: str) -> str:
            return fqn if rename is None else rename(f"{fqn}.weight").removesuffix(".weight")

        formats = {named(fqn): format for fqn, format in self.formats.items()}
        return layouts.quantization_config(
            self.layout, formats, [named(fqn) for fqn in self.in_high_precision]
        )


def examined(model: torch.nn.Module, layout: str) -> Exported:
    """Look at what a model's weights are, before anything is gathered.

    Raises:
        Float8ConfigError: there is no float8 layer, or the layout cannot hold one.
    """
    float8: dict[str, tuple[Float8Format, tuple[int, int]]] = {}
    others: list[str] = []
    for _, parts in blocks_of(unwrapped(model)):
        for part in parts:
            if not isinstance(part.module, torch.nn.Linear) or part.attribute != "weight":
                continue
            if (format := float8_format(part.module)) is None:
                others.append(part.fqn)
            else:
                float8[part.fqn] = format, (part.module.out_features, part.module.in_features)
    if not float8:
        raise Float8ConfigError(
            f"{type(model).__name__} has no layer whose forward multiplies in float8, so there are no codes to export; "
            "call f8sub.convert_to_float8 first, or save the model in bfloat16 with its own save_pretrained"
        )
    if layout == "auto":
        layout = layouts.natural_layout(float8)
    layouts.check(layout, float8)
    formats = {fqn: format for fqn, (format, _) in float8.items()}
    _warn(formats, others)
    return Exported(layout, formats, others)


def _warn(formats: dict[str, Float8Format], others: list[str]) -> None:
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


def float8_weights(
    model: torch.nn.Module,
    layout: str = "auto",
    *,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream a model's weights as an inference engine loads them, without a second cast.

    Under FSDP2 one block is gathered at a time, its float8 weights at 1 byte an element; nothing is gathered or made in
    high precision that training does not gather so. Every rank of the model iterates, to the end, and each gets all
    tensors; ``engine.load_weights(f8sub.float8_weights(model))`` is what vLLM takes.

    Args:
        model: converted; plain, or under FSDP2, HSDP, DDP or tensor parallelism. Its ``precompute_scales`` was called.
        layout: "fp8", "compressed-tensors", or "auto" for the one that most engines read.
        dtype: what forward computes in and other weights are exported in. None where FSDP2's ``param_dtype`` or the
            weights' own dtype says it.
        rename: from a parameter's name in the model to the engine's.

    Yields:
        Name and tensor: for a float8 layer of (N, K) e4m3 codes (N, K) and scales, see ``features/export/layouts.py``;
        for anything else its values. In memory of their own.

    Raises:
        Float8ConfigError: no float8 layer, a layout that cannot hold one, or a dtype that has to be given.
        Float8NumericsError: a weight has NaN.
    """
    yield from stream(unwrapped(model), examined(model, layout).layout, dtype, rename)


def stream(
    model: torch.nn.Module,
    layout: str,
    dtype: torch.dtype | None,
    rename: Rename | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """``float8_weights`` of a model that was ``examined``."""
    renamed = rename or str
    given: set[str] = set()
    for gathers, parts in blocks_of(model):
        if gathers is not None:
            gathers.unshard()
        try:
            for part in parts:
                with torch.no_grad():
                    made = _made(part, layout, dtype)
                for name, tensor in made.items():
                    if (to := renamed(name)) in given:
                        raise Float8ConfigError(f"rename gives {to!r} to two tensors, the second is {name}")
                    given.add(to)
                    yield to, tensor
        finally:
            if gathers is not None:
                gathers.reshard()


def _made(part: Part, layout: str, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    if part.is_float8:
        tensors = layouts.tensors_of(operand_of(part, dtype), layout)
        return {f"{part.fqn}.{leaf}" if part.fqn else leaf: tensor for leaf, tensor in tensors.items()}
    value = getattr(part.module, part.attribute).detach()
    value = value.full_tensor() if is_dtensor(value) else value
    # Of modules that are no layers, such as experts.
    value = value.dequantize() if isinstance(value, Float8Tensor) else value
    value = value.plain if isinstance(value, Weight) else value
    # Buffers stay as forward reads them: neither autocast nor FSDP2 casts a router's bias.
    if dtype is not None and value.is_floating_point() and part.attribute in part.module._parameters:
        return {part.name: value.to(dtype, copy=True)}
    return {part.name: value.clone(memory_format=torch.contiguous_format)}


def float8_state_dict(
    model: torch.nn.Module,
    layout: str = "auto",
    *,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All of ``float8_weights`` by name, and the ``quantization_config`` of the ``config.json`` beside them.

    Every rank of the model calls it, and each gets the whole model; ``save_float8`` needs memory for one block alone.

    Args:
        model: as in ``float8_weights``.
        layout: likewise.
        dtype: likewise.
        rename: likewise.

    Raises:
        Float8ConfigError: see ``float8_weights``.
        Float8NumericsError: see ``float8_weights``.
    """
    exported = examined(model, layout)
    return dict(stream(unwrapped(model), exported.layout, dtype, rename)), exported.config(rename)
