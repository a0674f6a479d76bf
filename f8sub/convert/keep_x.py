"""What layers are asked to keep of x, what "auto" is for an x, and what recipes refuse."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from f8sub.convert.checks import Chosen
from f8sub.convert.filters import LayerChoices
from f8sub.errors import Float8ConfigError
from f8sub.formats import why_not_derivable
from f8sub.linear.float8_linear import Float8Linear
from f8sub.linear.saved_input import AUTO, FLOAT8, HIGH_PRECISION, KEEP_X
from f8sub.recipe import Recipe
from f8sub.torch_compat import saved_tensors_hook
from f8sub.weights.guests import LayerGuest

_VIEWS = re.compile(
    r"(View|UnsafeView|ReshapeAlias|Transpose|T|Permute|Unsqueeze|Squeeze|Slice|Select|Expand|Alias)Backward\d+"
)
"""Nodes of operators whose result lies in their argument's storage; where one copies, CloneBackward0 is between."""


def layer_keep_x(keep_x: str | Mapping[str, str]) -> LayerChoices[str]:
    """What each layer keeps of x, one of ``KEEP_X``; "auto" where no pattern matches.

    Raises:
        Float8ConfigError: another word, or a key that is no pattern.
    """

    def read(chosen: Any) -> str:
        if chosen not in KEEP_X:
            raise Float8ConfigError(f"keep_x={chosen!r} is none of {', '.join(map(repr, KEEP_X))}")
        return str(chosen)

    return LayerChoices("keep_x", keep_x, read, AUTO)


def why_not_kept(recipe: Recipe, keep_x: str) -> str | None:
    """Why layers of a recipe cannot keep x so; None when they can."""
    rowwise, columnwise = recipe.formats("x")
    if columnwise is None or keep_x in (AUTO, FLOAT8):
        return None
    if keep_x == HIGH_PRECISION:
        if rowwise is None and recipe.scaling is not None:
            return f"its fprop does not cast x, whose amax {type(recipe.scaling).__name__} takes in forward"
        return None
    if rowwise is None:
        return "its fprop does not cast x, so that there are no codes to derive any from"
    return why_not_derivable(rowwise, columnwise)


def is_saved_by_its_maker(x: torch.Tensor) -> bool:
    """Whether the operator that made ``x``, or what ``x`` is a view of, saved its result for its own backward.

    ``scaled_dot_product_attention``, relu, sigmoid and softmax do. Told from the graph, so never while
    ``torch.compile`` traces; nor where hooks pack what is saved (checkpointing, offloading), each tensor by itself.
    """
    if torch.compiler.is_compiling() or (node := x.grad_fn) is None or saved_tensors_hook() is not None:
        return False
    while node is not None and _VIEWS.fullmatch(node.name()):
        node = node.next_functions[0][0]
    # Asked of the class: of the node itself it would be unpacked. What it makes besides has no gradient.
    return any(hasattr(type(node), name) for name in ("_saved_output", "_saved_result"))


def how_kept(x: torch.Tensor, recipe: Recipe) -> str:
    """What "auto" is: x itself where that takes no memory and no kernel."""
    free = is_saved_by_its_maker(x) and why_not_kept(recipe, HIGH_PRECISION) is None
    return HIGH_PRECISION if free else FLOAT8


def refuse_unkeepable(chosen: Sequence[Chosen]) -> None:
    """A recipe may be unable to keep x as it is asked to."""
    for _, fqn, plan, _, keep_x in chosen:
        if reason := why_not_kept(plan.recipe, keep_x):
            raise Float8ConfigError(
                f"{fqn} with recipe {plan.recipe.name!r} cannot take keep_x={keep_x!r}: {reason}. Give it 'auto'"
            )


class KeepX(LayerGuest):
    """What is said of the option."""

    @override
    def alike(self, layer: torch.nn.Module) -> dict[str, str]:
        return {"keep_x": layer.keep_x} if isinstance(layer, Float8Linear) else {}

    @override
    def deviation(self, layer: torch.nn.Module) -> str | None:
        keep_x = layer.keep_x if isinstance(layer, Float8Linear) else AUTO
        return None if keep_x == AUTO else f"keep_x={keep_x}"
