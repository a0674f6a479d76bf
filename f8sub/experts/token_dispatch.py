"""torchtitan's dispatchers of tokens, which then exchange tokens in float8."""

import functools

import torch
import torch.distributed as dist

from f8sub.errors import Float8ConfigError
from f8sub.experts.token_exchange import exchange_tokens, wire_format
from f8sub.recipe import Recipe, get_recipe

_SEAMS = {"_dispatch_token_exchange": False, "_combine_token_exchange": True}
"""Methods of torchtitan 0.3's ``AllToAllTokenDispatcher`` that exchange tokens, and whether they combine."""


def dispatch_tokens_in_float8(model: torch.nn.Module, recipe: Recipe | str) -> int:
    """Have the dispatchers of a torchtitan model send tokens at one byte an element, and dy likewise.

    Off unless it is called. See ``exchange_tokens`` for what is rounded; any other dispatcher calls that itself.

    Args:
        model: with modules that have an ``AllToAllTokenDispatcher`` of torchtitan 0.3.
        recipe: that of the experts, as ``exchange_tokens`` takes it.

    Returns:
        How many dispatchers there are.

    Raises:
        Float8ConfigError: there is none, or the recipe cannot be.
    """
    found = get_recipe(recipe)
    for combine in _SEAMS.values():
        wire_format(found, combine=combine)
    dispatchers = {
        id(value): value
        for module in model.modules()
        for value in vars(module).values()
        if all(callable(getattr(value, name, None)) for name in _SEAMS)
    }
    if not dispatchers:
        raise Float8ConfigError(
            "no module of the model has an AllToAllTokenDispatcher of torchtitan; call f8sub.exchange_tokens where "
            "your own code exchanges tokens"
        )
    for dispatcher in dispatchers.values():
        for name, combine in _SEAMS.items():
            setattr(dispatcher, name, functools.partial(_exchange, found, combine))
    return len(dispatchers)


def _exchange(
    recipe: Recipe,
    combine: bool,
    tokens: torch.Tensor,
    pg: dist.ProcessGroup,
    received: list[int],
    sent: list[int],
) -> torch.Tensor:
    return exchange_tokens(tokens, received, sent, pg, recipe=recipe, combine=combine)
