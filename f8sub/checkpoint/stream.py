"""Streams the weights of a model as an inference engine loads them, or collects them in a state dict."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from f8sub.checkpoint import layouts
from f8sub.checkpoint.gathered import (
    NamedTensor,
    blocks_of,
    experts_of,
    names_of,
    operand_of,
    tied_layers,
)
from f8sub.checkpoint.names import Pieces, Rename, renamed, unwrapped
from f8sub.convert.products import kinds, refuse_without_shapes
from f8sub.errors import Float8ConfigError, Float8NumericsError, Float8Warning, refuse_other_than_a_module
from f8sub.formats import Float8Format
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import is_dtensor
from f8sub.weights.weight import Weight, local_tensor, master_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

Progress = Callable[[list[str]], Iterable[str]]
"""Given the names of parameters and buffers, it returns them again, to show how far a loop is: ``tqdm.tqdm``."""

_COMPUTED = (torch.bfloat16, torch.float16, torch.float32)


class Exported(NamedTuple):
    """Describes what is exported of a model.

    Attributes:
        layout: one of ``layouts.LAYOUTS``.
        formats: of the float8 layers, by full name in the checkpoint; each expert's are layers of their own.
        in_high_precision: full names of the other linear layers, and of modules of experts.
        pieces: what the checkpoint calls the tensors of each parameter and buffer, by its name in the model.
    """

    layout: str
    formats: dict[str, Float8Format]
    in_high_precision: list[str]
    pieces: Pieces

    def config(self, rename: Rename | None) -> dict[str, Any]:
        """Return the ``quantization_config`` of a ``config.json``."""

        def named(fqn: str) -> str:
            # ``rename`` is a function of tensors' names, and a config names layers.
            return renamed(f"{fqn}.weight", rename).removesuffix(".weight")

        formats = {named(fqn): format for fqn, format in self.formats.items()}
        return layouts.quantization_config(
            self.layout, formats, [named(fqn) for fqn in self.in_high_precision]
        )


def examined(model: torch.nn.Module, layout: str, dtype: torch.dtype | None) -> Exported:
    """Look at what a model's weights are, before anything is gathered.

    Raises:
        Float8ConfigError: there is no float8 layer, the layout cannot hold one, or ``dtype`` is none that a forward
            computes in.
    """
    refuse_other_than_a_module("an export", model)
    refuse_without_shapes(model)
    if dtype is not None and dtype not in _COMPUTED:
        raise Float8ConfigError(
            f"dtype is the dtype of the forward, one of {', '.join(map(str, _COMPUTED))}; got {dtype!r}"
        )
    float8: dict[str, tuple[Float8Format, tuple[int, int]]] = {}
    others: dict[str, None] = {}
    model = unwrapped(model)
    parts = [part for _, parts in blocks_of(model) for part in parts]
    pieces = names_of(model, parts)
    for part in parts:
        for piece in pieces[part.name]:
            layer, shape = piece.name.removesuffix(".weight"), tuple(part.tensor.shape)
            if piece.rows is not None:
                shape = piece.rows.stop - piece.rows.start, shape[2]
            # A router is a class of its own in transformers, and a linear layer in engines.
            is_table = isinstance(part.module, torch.nn.Embedding)
            # Embeddings are (N, K) weights as well, which engines do not look for in a config.
            is_matrix = part.tensor.dim() == 2 and part.attribute == "weight" and not is_table
            if part.format is not None and len(shape) == 2:
                float8[layer] = part.format, shape
                layouts.check_rows(layer, part.format, piece.rows)
            elif is_matrix:
                others[layer] = None
            elif part.tensor.dim() == 3:  # experts, which readers know by their module's name
                others[layer.rpartition(f".{piece.expert}.")[0] if piece.rows else part.fqn] = None
    # A head that is tied to an embedding is a linear layer to engines, under a name without tensors.
    others |= dict.fromkeys(tied_layers(model))
    if not float8:
        raise Float8ConfigError(
            f"{type(model).__name__} has no layer whose forward multiplies in float8, so there are no codes to export; "
            "call f8sub.convert_to_float8 first, or save the model in bfloat16 with its own save_pretrained"
        )
    if layout == "auto":
        layout = layouts.natural_layout(float8)
    layouts.check(layout, float8)
    formats = {fqn: format for fqn, (format, _) in float8.items()}
    layouts.warn_of_engines(formats, list(others), [part.name for part in parts])
    return Exported(layout, formats, list(others), pieces)


def float8_weights(
    model: torch.nn.Module,
    layout: str = "auto",
    *,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream a model's weights as an inference engine loads them, without a second cast.

    Under FSDP2 one block is gathered at a time, its float8 weights at 1 byte per element; nothing is gathered or
    computed in high precision that training does not gather so, but experts that checkpoints keep in one tensor.
    Every rank of the model iterates, to the end, and each gets all tensors;
    ``engine.load_weights(f8sub.float8_weights(model))`` is what vLLM takes.

    Args:
        model: converted; plain, or under FSDP2, HSDP, DDP or tensor parallelism. Its ``precompute_scales`` was called.
        layout: "fp8", "compressed-tensors", or "auto" for the one that most engines read.
        dtype: what forward computes in and other weights are exported in. None where FSDP2's ``param_dtype`` or the
            weights' own dtype says it.
        rename: from a tensor's name to the engine's. A tensor has its parameter's name; of a model of transformers the
            one that ``save_pretrained`` gives it, and of an expert "MODULE.5.w1.weight".

    Yields:
        Name and tensor: for a float8 layer or expert of (N, K) e4m3 codes (N, K) and scales, see
        ``checkpoint/layouts.py``; for anything else its values. In memory of their own.

    Raises:
        Float8ConfigError: no float8 layer, a layout that cannot hold one, a dtype that has to be given or that no
            forward computes in, a tensor on meta, or a ``rename`` that gives no name.
        Float8NumericsError: a weight has NaN or infinity.
    """
    exported = examined(model, layout, dtype)
    yield from stream(unwrapped(model), exported, dtype, rename)


def stream(
    model: torch.nn.Module,
    exported: Exported,
    dtype: torch.dtype | None,
    rename: Rename | None,
    progress: Progress | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``float8_weights`` of a model that was ``examined``."""
    # Names that were given out: a ``rename`` that maps two to one would lose a tensor silently.
    given: set[str] = set()
    blocks = list(blocks_of(model))
    if empty := [part.name for _, parts in blocks for part in parts if part.tensor.is_meta]:
        raise Float8ConfigError(
            f"{', '.join(kinds(empty))}: on meta, where a tensor has no values; give the model values first, with "
            "to_empty and what it loads"
        )
    names = _shown(progress or iter, [part.name for _, parts in blocks for part in parts])
    for gathers, parts in blocks:
        left: dict[str, torch.Tensor] = {}
        if gathers is not None:
            # Before unshard: afterwards FSDP2 has float8 data alone of these weights.
            left = _left_in_high_precision(gathers, parts, exported, dtype)
            # All-gathers of one block at a time, on every rank in the same order.
            gathers.unshard()
        try:
            for part in parts:
                next(names, None)
                for name, tensor in _made(part, exported, dtype, left.pop(part.name, None)):
                    if (to := renamed(name, rename)) in given:
                        raise Float8ConfigError(f"rename gives {to!r} to two tensors, the second is {name}")
                    given.add(to)
                    yield to, tensor
        finally:
            if gathers is not None:
                gathers.reshard()
    next(names, None)  # at whose end a bar is full


def _shown(progress: Progress, names: list[str]) -> Iterator[str]:
    """Yield from ``progress``, which may raise on the rank that shows it, while the others need to go on."""
    try:
        yield from progress(names)
    except Exception as error:
        warnings.warn(f"progress raised {error!r}; the weights go on without it", Float8Warning, stacklevel=2)


def _has_codes(part: NamedTensor, exported: Exported) -> bool:
    """Return whether float8 data of a part are exported; those of experts are where each has a name."""
    return part.format is not None and (
        part.tensor.dim() == 2 or exported.pieces[part.name][0].rows is not None
    )


@torch.no_grad()
def _left_in_high_precision(
    gathers: "FSDPModule", parts: list[NamedTensor], exported: Exported, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Return whole values of what FSDP2 gathers in float8 and is exported in high precision, by the part's name."""
    left = [part for part in parts if part.format is not None and not _has_codes(part, exported)]
    if left:
        gathers.reshard()  # a forward may have left it unsharded
    return {
        part.name: _values(part.tensor, dtype)
        for part in left
        if master_of(local_tensor(part.tensor)) is not None
    }


@torch.no_grad()
def _made(
    part: NamedTensor, exported: Exported, dtype: torch.dtype | None, value: torch.Tensor | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of a part; ``value`` is what it is exported as, where that is given."""
    pieces, layout = exported.pieces[part.name], exported.layout
    if _has_codes(part, exported):
        of_expert = experts_of(part, dtype) if part.tensor.dim() == 3 else iter((operand_of(part, dtype),))
        for index, operand in enumerate(of_expert):
            tensors = layouts.tensors_of(operand, layout)
            for name, rows in ((each.name, each.rows) for each in pieces if each.expert in (None, index)):
                for leaf, tensor in layouts.rows_of(tensors, rows).items():
                    yield name.removesuffix("weight") + leaf, tensor
        return
    value = _values(part.tensor) if value is None else value.to(part.tensor.dtype)
    # Buffers stay as forward reads them: neither autocast nor FSDP2 casts a router's bias.
    if value.is_floating_point() and part.attribute in part.module._parameters:
        value = value if dtype is None else value.to(dtype)
        if not value.isfinite().all():
            raise Float8NumericsError(
                f"{part.name} has NaN or infinity, which an engine would serve; restore the weights from a checkpoint "
                "before they are exported"
            )
    for piece in pieces:
        own = value if piece.expert is None else value[piece.expert, piece.rows]
        yield piece.name, own.clone(memory_format=torch.contiguous_format)


def _values(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the whole tensor in high precision, also where it was gathered as float8 data."""
    local = local_tensor(tensor.detach())
    value = local.dequantize() if isinstance(local, Float8Tensor) else local
    value = value.plain if isinstance(value, Weight) else value
    value = value if dtype is None else value.to(dtype)
    if not is_dtensor(tensor):
        return value
    return torch.distributed.tensor.DTensor.from_local(
        value,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    ).full_tensor()


def float8_state_dict(
    model: torch.nn.Module,
    layout: str = "auto",
    *,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return all of ``float8_weights`` by name, and the ``quantization_config`` of the ``config.json`` beside them.

    Every rank of the model calls it, and each gets the whole model; ``save_float8`` needs memory for one block alone.

    Args:
        model: as in ``float8_weights``.
        layout: as in ``float8_weights``.
        dtype: as in ``float8_weights``.
        rename: as in ``float8_weights``.

    Raises:
        Float8ConfigError: see ``float8_weights``.
        Float8NumericsError: see ``float8_weights``.
    """
    exported = examined(model, layout, dtype)
    return dict(stream(unwrapped(model), exported, dtype, rename)), exported.config(rename)
