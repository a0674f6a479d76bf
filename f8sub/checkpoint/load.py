"""load_float8: start from a float8 checkpoint, such as Qwen3-FP8 or DeepSeek-V3, shard by shard."""

import os
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from f8sub.checkpoint.gathered import NamedTensor, blocks_of, names_of
from f8sub.checkpoint.load_codes import (
    Held,
    are_powers_of_2,
    can_hold,
    check_not_gathered,
    held_experts,
    hold,
    hold_experts,
    in_order,
    plan_for,
)
from f8sub.checkpoint.names import Piece, Rename, other_names, renamed, unwrapped
from f8sub.checkpoint.quantization_config import (
    StoredTensor,
    described_tile,
    is_of_activations,
    refuse_other_methods,
    scale_of,
)
from f8sub.checkpoint.reader import CONFIG, Checkpoint, some
from f8sub.checkpoint.stream import Progress
from f8sub.convert.primary_weights import reread_shards
from f8sub.errors import (
    Float8ConfigError,
    Float8NumericsError,
    Float8ShapeError,
    Float8Warning,
    first_and_more,
    refuse_other_than_a_module,
)
from f8sub.formats import ALL, Operand, Tile
from f8sub.kernels.gemm.select import Plan
from f8sub.linear.float8_linear import Float8Linear
from f8sub.torch_compat import is_dtensor, place_in_whole, reshard, states_follow_parameters
from f8sub.weights.weight import conversion_of, local_tensor, take_place

_HIGH_PRECISION = ("F64", "F32", "F16", "BF16")
"""safetensors' names of what a parameter is read from without scales."""

_SECOND_CAST = 0.026
"""Relative error of values that are cast to e4m3 twice with scales of different rules, which is that of one cast.

Measured on published 128x128 weights with float32 scales, cast again with powers of two.
"""

Where = tuple[slice, ...]
"""A part of a tensor, a slice with a start and an end for each dimension."""


def load_float8(
    model: torch.nn.Module,
    folder: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    strict: bool = True,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> None:
    """Fill a model from a checkpoint whose linear weights are float8 codes and scales.

    Each rank reads its own shards, one tensor at a time; nothing is sent. Call it before or after ``fully_shard``, and
    ``precompute_scales`` after it. Everything is checked before the first value is written.

    A frozen layer that was converted with ``primary_weights=True``, by a recipe whose weights have the file's tiles,
    keeps the file's own codes and scales, float32 ones or powers of two, at one byte per element, without values in
    high precision. It multiplies and sends them as they are. So do frozen experts whose tiles end with gate, up and
    down, if FSDP2 shards whole experts. Under FSDP2 load after ``fully_shard``, before the first forward.

    Any other parameter takes the values that the codes stand for. A converted layer casts them again. Where the recipe
    has the file's tiles and both have powers of two as scales, the cast has exactly these values. Where both have
    float32 scales, it has the file's codes, and scales that differ by the rounding of one amax. Other layers are cast a
    second time, with a ``Float8Warning``.

    Args:
        model: converted or not.
        folder: with ``config.json`` and ``model.safetensors``, or an index and its files. ``quant_method`` is fp8,
            compressed-tensors, fbgemm_fp8 or modelopt. Static scales of activations (``input_scale``) are left out.
        rename: from a tensor's name to the checkpoint's. A tensor has its parameter's name; of a model of transformers
            the one that ``save_pretrained`` gives it, and of an expert "MODULE.5.w1.weight".
        strict: raise where the model and the checkpoint have different names; False reads what both have, each expert
            that is there, leaves what is missing as it is, and lists all such names in a ``Float8Warning``. Names that
            a model of transformers says it ignores, such as a multi-token-prediction layer's, are no difference.
        device: of parameters that are on meta; each module gets its memory just before it is filled. None for that of
            their mesh, if they are sharded. Buffers that checkpoints do not hold stay on meta.
        progress: given the names of the parameters, it returns them again, to show how far it is: ``tqdm.tqdm``.

    Raises:
        Float8ConfigError: no such checkpoint, a file cut short, another layout or method, codes that
            ``config.json`` describes as others, names that differ, a frozen weight that was gathered before, a
            parameter on meta without a device, or one on meta of which the file has a part alone.
        Float8ShapeError: a tensor or its scales have another shape.
        Float8NumericsError: a scale is negative or not finite; or a code is NaN, which is found while it is read.
    """
    refuse_other_than_a_module("load_float8", model)
    reshard(model)  # else the next reshard would undo a load
    with Checkpoint(Path(folder)) as checkpoint:
        whole = unwrapped(model)
        parts = [part for _, parts in blocks_of(whole) for part in parts]
        _check_memory(parts, device)
        # Names, shapes and scales are checked here, before the first value is written.
        sources = _matched(whole, parts, checkpoint, rename, strict)
        for part, of_part in sources.items():
            for source in of_part:
                _check_shapes(part, source, checkpoint)
        experts = held_experts(sources, lambda source: _scales_of(source, checkpoint))
        conversions = {found for part in sources if (found := conversion_of(part.module)) is not None}
        for conversion in conversions:
            conversion.settle()  # else an amax history on its way would overwrite what is loaded
        again = []
        names = (progress or iter)([part.name for part in sources])
        for _, (part, of_part) in zip(names, sources.items(), strict=True):
            _give_memory(part, device)
            with torch.no_grad():
                if part in experts:
                    _hold(part, experts[part], of_part, checkpoint)
                    continue
                exact = [_filled(part, source, checkpoint) for source in of_part]
            if part.format is not None and not all(exact):
                again.append(part.fqn)
        for conversion in conversions:
            conversion.loaded()  # scales are out of date on every rank, as after load_state_dict
        reread_shards(p.module for p in sources if isinstance(p.module, Float8Linear) or p in experts)
        _bring_states(whole, sources)
    if again:
        _warn_of_second_cast(again)


def _bring_states(model: torch.nn.Module, loaded: Iterable[NamedTensor]) -> None:
    """Have what a training keeps besides weights begin with the weights that were loaded, on their devices."""
    for part in loaded:
        if isinstance(part.module, Float8Linear):
            # As of a state dict that has this parameter alone.
            part.module._f8sub.conversion.layer_loaded(part.module, {part.attribute: part.tensor}, "")
    states_follow_parameters(model)


def _warn_of_second_cast(again: list[str]) -> None:
    warnings.warn(
        f"{first_and_more(again)}: the checkpoint's scales are of other blocks, or of another "
        f"rule, than the recipe's, so the weights are cast to float8 a second time, {_SECOND_CAST} off (relative). "
        "Convert with a recipe whose weights have the checkpoint's blocks and its kind of scales",
        Float8Warning,
        stacklevel=3,
    )


def _check_memory(parts: Iterable[NamedTensor], device: torch.device | str | None) -> None:
    on_meta = [
        part.name
        for part in parts
        if local_tensor(part.tensor).is_meta and device is None and not is_dtensor(part.tensor)
    ]
    if on_meta:
        raise Float8ConfigError(
            f"{some(on_meta)} on meta, which has no memory for values; give load_float8 device=, or call "
            "model.to_empty(device=...) first"
        )


def _give_memory(part: NamedTensor, device: torch.device | str | None) -> None:
    """Move a parameter or buffer from meta to its device."""
    tensor = part.tensor
    if not local_tensor(tensor).is_meta:
        return
    where = tensor.device_mesh.device_type if is_dtensor(tensor) else device
    with torch.no_grad():
        made = torch.empty_like(tensor, device=where)
    if not isinstance(tensor, torch.nn.Parameter):
        part.module._buffers[part.attribute] = made
    # The same object, which a tied layer, FSDP2 and an optimizer hold, too.
    elif not take_place(torch.nn.Parameter(made, tensor.requires_grad), tensor):
        raise Float8ConfigError(
            f"{part.name}: it is on meta, and something holds on to it as it is; call model.to_empty(device=...) first"
        )
    part.module.load_state_dict({}, strict=False)  # after which FSDP2 looks at it anew


def _matched(
    model: torch.nn.Module,
    parts: list[NamedTensor],
    checkpoint: Checkpoint,
    rename: Rename | None,
    strict: bool,
) -> dict[NamedTensor, list[StoredTensor]]:
    """Find the sources of every parameter, or of what is there of it; names of one side are an error if ``strict``."""
    found: dict[NamedTensor, list[StoredTensor]] = {}
    missing = []
    unexpected, absent = _ignored(model)
    used: set[str] = set()
    others = other_names(model)
    pieces = names_of(model, parts)
    for part in parts:
        named = [[piece._replace(name=renamed(piece.name, rename)) for piece in pieces[part.name]]]
        # Under another name that it is tied to, or whole, where a checkpoint of parts could be.
        also = [Piece(renamed(name, rename)) for name in (*others.get(part.name, ()), part.name)]
        named += [[piece] for piece in also if piece not in named[0]]
        there = [each for each in named if all(piece.name in checkpoint for piece in each)]
        if not there:
            of_part = [piece for piece in named[0] if piece.name in checkpoint]
            on_meta = local_tensor(part.tensor).is_meta
            if of_part or on_meta or not any(pattern.search(part.name) for pattern in absent):
                missing += [piece.name for piece in named[0] if piece.name not in checkpoint]
            if not of_part:
                continue
            if on_meta:
                raise Float8ConfigError(
                    f"{part.name}: it is on meta, and of its parts the checkpoint lacks {some(missing)}, which would "
                    "have no values; give the model values first, with model.to_empty(device=...) and what it starts "
                    "from"
                )
            there = [of_part]
        sources = [[_source(piece, part, checkpoint) for piece in each] for each in there]
        found[part] = sources[0]
        used |= {
            name for each in sources for source in each for name in (source.piece.name, source.scale) if name
        }
    # Static scales of activations stand beside a float8 layer, or beside the module that the layers are in.
    layers = {s.piece.name.removesuffix(".weight") for of_part in found.values() for s in of_part if s.scale}
    layers |= {layer.rpartition(".")[0] for layer in layers}
    unused = sorted(
        name
        for name in checkpoint
        if name not in used
        and not any(pattern.search(name) for pattern in unexpected)
        and not is_of_activations(name, layers)
    )
    if missing:
        # The better error first: such a method's files have other names for every weight.
        refuse_other_methods(checkpoint.folder / CONFIG, checkpoint.config)
    if missing or unused:
        _report_names(missing, unused, strict)
    return found


def _ignored(model: torch.nn.Module) -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    """Return patterns of names that only a file, and that only the model may have, as transformers' loader has them.

    Source of the two buffers' names: ``_adjust_missing_and_unexpected_keys`` of transformers 5.
    """
    unexpected, missing = (
        {pattern for module in model.modules() for pattern in getattr(module, attribute, None) or ()}
        for attribute in ("_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_load_missing")
    )
    for name, _ in model.named_buffers():
        if name.endswith("rotary_emb.inv_freq"):
            unexpected.add(r"rotary_emb\.inv_freq")
        if name.endswith("position_ids"):
            unexpected.add(r"(^|\.)position_ids$")
    return [re.compile(each) for each in sorted(unexpected)], [re.compile(each) for each in sorted(missing)]


def _report_names(missing: Sequence[str], unused: Sequence[str], strict: bool) -> None:
    """Report names that one side alone has: an error if ``strict``, or else a warning of all of them."""
    if not strict:
        keep = "keeps the values that it had" if len(missing) == 1 else "keep the values that they had"
        lacks = f"lacks {', '.join(missing)}, which {keep}" if missing else ""
        has = f"has {', '.join(unused)}, which the model has not" if unused else ""
        warnings.warn(
            f"the checkpoint {' and '.join(filter(None, (lacks, has)))}; the rest is loaded",
            Float8Warning,
            stacklevel=4,
        )
        return
    first = missing[0] if missing else ""
    # The usual difference is a prefix: then the error shows the ``rename`` that mends it.
    before = next((name.removesuffix(first) for name in unused if first and name.endswith(f".{first}")), "")
    known = f"lambda name: {before!r} + name" if before else ""
    raise Float8ConfigError(
        f"the checkpoint lacks {some(missing)} and has {some(unused)}, which the model has not; give "
        f"rename={known}, or strict=False to load what both have"
    )


def _source(piece: Piece, part: NamedTensor, checkpoint: Checkpoint) -> StoredTensor:
    """Return how a tensor is read; Float8ConfigError where float8 has no scales, or a dtype is no number without."""
    dtype = checkpoint.slice_of(piece.name).get_dtype()
    if dtype == "F8_E4M3":
        layer, file = piece.name.removesuffix(".weight"), checkpoint.folder / CONFIG
        tile = described_tile(layer, file, checkpoint.config)
        return StoredTensor(piece, scale_of(piece.name, checkpoint, checkpoint.config), tile)
    if part.tensor.is_floating_point() and dtype not in _HIGH_PRECISION:
        raise Float8ConfigError(
            f"{piece.name} is stored as {dtype}, which load_float8 does not read; it reads F8_E4M3 with scales, and "
            f"{', '.join(_HIGH_PRECISION)}"
        )
    return StoredTensor(piece, None, Tile(ALL, ALL))


def _check_shapes(part: NamedTensor, source: StoredTensor, checkpoint: Checkpoint) -> None:
    name, shape = source.piece.name, tuple(part.tensor.shape)
    if source.piece.rows is not None:
        shape = source.piece.rows.stop - source.piece.rows.start, shape[2]
    found = checkpoint.shape_of(name)
    if found != shape:
        raise Float8ShapeError(f"{part.name}: the model has {shape}, the checkpoint's {name} has {found}")
    if source.scale is None:
        return
    if len(shape) != 2:
        raise Float8ShapeError(f"{part.name}: {name} is float8 of {len(shape)} dimensions; matrices are read")
    expected, scales = source.tile.scale_shape((shape[0], shape[1])), checkpoint.shape_of(source.scale)
    if scales != expected and not (source.tile.is_whole and scales in ((), (1,))):
        raise Float8ShapeError(
            f"{part.name}: a weight of {shape} with scales of {source.tile} has {expected} of them, and the "
            f"checkpoint's {source.scale} has {scales}; its config.json names another block size than it was "
            "written with"
        )
    values = _scales_of(source, checkpoint)
    if not bool(((values >= 0) & values.isfinite()).all()):
        raise Float8NumericsError(
            f"{part.name}: the checkpoint's {source.scale} has scales that are negative or not finite; the file is "
            "damaged, or its scales are of another kind than config.json says"
        )
    if _plan_of_codes(part, source, values) is not None:
        check_not_gathered(part.module)


def _plan_of_codes(part: NamedTensor, source: StoredTensor, scales: torch.Tensor) -> Plan | None:
    """Return the plan of a layer that keeps the file's data; None for a parameter that takes their values."""
    if not isinstance(part.module, Float8Linear) or not can_hold(part.module, source.tile):
        return None
    return plan_for(part.module._f8sub.plan, is_power_of_2=are_powers_of_2(scales))


def _scales_of(source: StoredTensor, checkpoint: Checkpoint) -> torch.Tensor:
    """Read all scales of a tensor, float32, (tiles along N, tiles along K)."""
    scales: torch.Tensor = checkpoint.read(source.scale or "")
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    if not scales.is_floating_point():
        raise Float8ConfigError(
            f"{source.scale} is stored as {scales.dtype}, and scales are float or uint8 exponents"
        )
    rows, cols = checkpoint.shape_of(source.piece.name)
    return scales.float().view(source.tile.scale_shape((rows, cols)))


def _hold(part: NamedTensor, held: Held, sources: list[StoredTensor], checkpoint: Checkpoint) -> None:
    """Read this rank's experts, and turn their weight into the file's data."""
    experts = _local_slices(part.tensor)[0]
    here = [s.piece.name for s in in_order(sources) if experts.start <= (s.piece.expert or 0) < experts.stop]
    hold_experts(part, held, [_codes(checkpoint.read(name), name) for name in here], experts.start)


def _codes(codes: torch.Tensor, name: str) -> torch.Tensor:
    """Return the float8 data; Float8NumericsError where one of them is NaN or, in e5m2, infinite."""
    # Without the sign: e4m3's only NaN is 0x7F; e5m2's infinity is 0x7C, and its NaN 0x7D to 0x7F.
    beyond = 0x7C if codes.dtype == torch.float8_e5m2 else 0x7F
    if bool(((codes.view(torch.uint8) & 0x7F) >= beyond).any()):
        raise Float8NumericsError(
            f"{name}: the checkpoint's codes have NaN, so the file is damaged, and the model is loaded in part"
        )
    return codes


def _filled(part: NamedTensor, source: StoredTensor, checkpoint: Checkpoint) -> bool:
    """Write this rank's part of a tensor, and return whether a layer that multiplies it has the file's own values."""
    local, where = local_tensor(part.tensor), _local_slices(part.tensor)
    if source.piece.rows is not None:
        found = _in_expert(local, where, source.piece)
        if found is None:
            return True
        local, where = found
    stored = checkpoint.slice_of(source.piece.name)
    if source.scale is None:
        # A slice of a file reads only its bytes, so a rank reads its own part of each tensor.
        local.copy_(stored[where] if where else stored[...])
        return True
    codes = _codes(stored[where], source.piece.name)
    scales = _scales_of(source, checkpoint)
    is_power_of_2, format = are_powers_of_2(scales), part.format
    plan = _plan_of_codes(part, source, scales)
    of_file = None if plan is None else plan.recipe.fprop.b
    if plan is not None and of_file is not None and isinstance(part.module, Float8Linear):
        codes = codes.to(local.device)
        scales = scales.to(local.device, of_file.scale_rule.stored_as)
        hold(part.module, plan, Operand(codes, scales, of_file), (where[0].start, where[1].start))
        return True
    for dim, (edge, at) in enumerate(zip((source.tile.rows, source.tile.cols), where, strict=True)):
        if edge != ALL:
            # One scale for each row (column) of this rank's part, by its place in the whole weight.
            tiles = torch.arange(at.start, at.stop, dtype=torch.int64, device="cpu") // edge
            scales = scales.index_select(dim, tiles)
    local.copy_(codes.float() * scales)
    if format is None or format.tile != source.tile or format.dtype != torch.float8_e4m3fn:
        return False
    # Tiles and rule as in the file: casting these values again finds the same scales, so the same data.
    return format.scale_rule.is_power_of_2 == is_power_of_2


def _in_expert(local: torch.Tensor, where: Where, piece: Piece) -> tuple[torch.Tensor, Where] | None:
    """Return what this rank has of an expert's rows, and where that is in the piece; None for nothing."""
    experts, rows, cols = where
    if piece.rows is None or piece.expert is None or not experts.start <= piece.expert < experts.stop:
        return None
    first, last = max(rows.start, piece.rows.start), min(rows.stop, piece.rows.stop)
    if first >= last:
        return None
    part = local[piece.expert - experts.start, first - rows.start : last - rows.start]
    return part, (slice(first - piece.rows.start, last - piece.rows.start), cols)


def _local_slices(tensor: torch.Tensor) -> Where:
    """Return where this rank's part of a DTensor is in the whole; all of any other tensor."""
    if not is_dtensor(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = place_in_whole(tensor)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
