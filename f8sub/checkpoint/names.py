"""The names that a model's parameters have in a checkpoint, where one parameter may be many tensors.

transformers 5 keeps the weights of all experts in one parameter, gate and up in the same one, and a checkpoint has a
linear layer for each expert's gate, up and down. Its own rule of how they are split is what ``save_pretrained`` calls.
That rule is asked here with numbers of rows in place of values, and so holds for float8 data and scales too.

Of a tensor that a model has under several names, a checkpoint may hold all of them, or any one.
"""

import bisect
import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from f8sub.convert.checks import quantizers_steps
from f8sub.errors import Float8ConfigError
from f8sub.torch_compat import is_fsdp_module

_PARTS = 4
"""Parts that an expert's rows count as: every rule that is known splits them into halves."""

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Segments that ``torch.compile`` and checkpointing wrappers put into names."""


class Piece(NamedTuple):
    """A tensor of a checkpoint, and which part of a parameter it is.

    Attributes:
        name: in the checkpoint.
        expert: index of the expert whose weight it is; None for the whole parameter.
        rows: of that expert's matrix; None for all of the parameter.
    """

    name: str
    expert: int | None = None
    rows: slice | None = None


Shapes = Mapping[str, tuple[int, ...]]
Pieces = dict[str, list[Piece]]

Rename = Callable[[str], str]
"""From a tensor's name in a checkpoint of the model to the engine's."""


def renamed(name: str, rename: Rename | None) -> str:
    """Return the name that ``rename`` gives; Float8ConfigError where that is none."""
    if rename is not None and not callable(rename):
        raise Float8ConfigError(f"rename is a function from a name to another, got {rename!r}")
    found: object = name if rename is None else rename(name)
    if not isinstance(found, str):
        raise Float8ConfigError(f"rename returned {found!r} for {name!r}, which is no name")
    return found


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model in a DistributedDataParallel, or in what ``torch.compile`` returned."""
    while True:
        inner = (
            model.module if isinstance(model, DistributedDataParallel) else model._modules.get("_orig_mod")
        )
        # A wrapper that was sharded gathers what is in it.
        if inner is None or is_fsdp_module(model):
            return model
        model = inner


def without_wrappers(name: str) -> str:
    """Return a name without the segments of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def pieces_of(model: torch.nn.Module, shapes: Shapes, experts: Mapping[str, str]) -> Pieces:
    """Return the checkpoint's tensors for each parameter and buffer.

    Args:
        model: one of transformers, whose own rule holds; or any other.
        shapes: of its parameters and buffers, by name.
        experts: names of the weights of three dimensions, (E, N, K), one matrix per expert; with what stands in a name
            for an expert's layer where the model has no rule: of "layers.0.experts.w1", "w1" makes the name
            "layers.0.experts.5.w1.weight".
    """
    # Each parameter by its own name, unless a rule splits it.
    found = {name: [Piece(name)] for name in shapes}
    ruled = _ruled(model, shapes)
    if ruled is not None:
        return found | ruled
    for name, leaf in experts.items():
        module = name.removesuffix(leaf)
        count, rows = shapes[name][:2]
        found[name] = [
            Piece(f"{module}{index}.{leaf}.weight", index, slice(0, rows)) for index in range(count)
        ]
    return found


def _ruled(model: torch.nn.Module, shapes: Shapes) -> Pieces | None:
    """Return the pieces by the rule of transformers; None where the model is none of its models."""
    transformers: Any = sys.modules.get("transformers")  # which made the model, if it is one
    inner = model._modules.get("_orig_mod") or model
    if transformers is None or not isinstance(inner, transformers.PreTrainedModel):
        return None
    from transformers.core_model_loading import revert_weight_conversion

    # A number for each row, and for each part of an expert's: no rule that is known looks along the last dimension.
    sizes = {name: _counted(shape) for name, shape in shapes.items()}
    # Numbers are unique over the model, so each one tells the parameter that a reverted tensor came from.
    firsts = dict(zip(sizes, itertools.accumulate(map(math.prod, sizes.values()), initial=0), strict=False))
    numbers = {
        name: torch.arange(first, first + math.prod(sizes[name]), dtype=torch.int64, device="cpu").view(
            sizes[name]
        )
        for name, first in firsts.items()
    }
    of_number = {first: name for name, first in firsts.items() if numbers[name].numel()}
    starts = list(of_number)
    found: dict[str, list[Piece | None]] = {}
    with _own_rules(inner):
        reverted = revert_weight_conversion(inner, dict(numbers))
    for name, tensor in reverted.items():
        # No number tells where an empty tensor came from; it keeps its own name.
        if not tensor.numel():
            continue
        # Its first number: parameters begin at ``starts``, so the last start before it is its parameter's.
        first = int(tensor.flatten()[0])
        source = of_number[starts[bisect.bisect_right(starts, first) - 1]]
        found.setdefault(source, []).append(_piece(name, tensor, numbers[source], shapes[source]))
    # What a rule makes of a parameter that is no part of its rows keeps the parameter's name.
    read = {name: [piece for piece in pieces if piece is not None] for name, pieces in found.items()}
    return {name: pieces for name, pieces in read.items() if len(pieces) == len(found[name])}


@contextlib.contextmanager
def _own_rules(model: torch.nn.Module) -> Iterator[None]:
    """Give a model of transformers the rules of its class for a while, in place of those of its quantizer.

    What the loaded rules have beside, such as a prefix or a user's renaming, stays. transformers up to 5.23 keep a
    quantizer's rules of a model that they dequantized.
    """
    if not any(map(quantizers_steps, model.__dict__.get("_weight_conversions") or ())):
        yield
        return
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    loaded = model._weight_conversions
    own = [
        rule
        for rule in get_model_conversion_mapping(model, add_legacy=False)  # type: ignore[arg-type]
        if not isinstance(rule, PrefixChange)
    ]
    known = [(rule.source_patterns, rule.target_patterns) for rule in own]
    beside = [
        rule
        for rule in loaded  # type: ignore[union-attr]
        if not quantizers_steps(rule) and (rule.source_patterns, rule.target_patterns) not in known
    ]
    model._weight_conversions = own + beside or None  # type: ignore[assignment]
    try:
        yield
    finally:
        model._weight_conversions = loaded


def _counted(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 3:
        return shape[0], math.gcd(shape[1], _PARTS), 1
    return (*shape[:-1], 1) if len(shape) > 1 else (math.prod(shape),)


def _piece(name: str, found: torch.Tensor, whole: torch.Tensor, shape: tuple[int, ...]) -> Piece | None:
    """Return the part of a parameter that a tensor of numbers is; None where it is no run of its rows."""
    keeps_shape, found, count = found.dim() == whole.dim(), found.flatten(), found.numel()
    if keeps_shape and torch.equal(found, whole.flatten()):
        return Piece(name)
    first = int(found[0] - whole.flatten()[0])
    if len(shape) != 3 or not torch.equal(found, whole.flatten()[first : first + count]):
        return None
    # ``whole`` counts (E, parts per expert, 1): the number is expert * parts + part.
    expert, part = divmod(first, whole.shape[1])
    rows = shape[1] // whole.shape[1]
    return (
        Piece(name, expert, slice(part * rows, (part + count) * rows))
        if part + count <= whole.shape[1]
        else None
    )


def other_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the other names of each tied parameter or buffer, by the first one."""
    names: dict[torch.Tensor, list[str]] = {}
    for found in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in found:
            names.setdefault(tensor, []).append(without_wrappers(name))
    return {first: others for first, *others in names.values() if others}
