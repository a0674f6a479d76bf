"""Layer 6. Which layers are converted: one reason for every layer that is not."""

import fnmatch
from collections.abc import Callable, Sequence

import torch

from f8sub.formats import HIGH_PRECISION
from f8sub.linear import Float8Linear

FilterFn = Callable[[torch.nn.Module, str], bool]

MULTIPLE = 16
"""Both dimensions of a float8 GEMM operand. Source: cuBLASLt, ATen/native/cuda/ScaledBlas.cpp."""

DEFAULT_SKIP = ("lm_head",)
"""The output projection stays in high precision: its gradient and logits decide the loss most directly."""


def why_not(
    module: torch.nn.Module,
    fqn: str,
    *,
    filter_fn: FilterFn | None,
    skip: Sequence[str],
) -> str | None:
    """Why a linear layer stays as it is; None when it is converted.

    Args:
        module: an ``nn.Linear``, or of a subclass of it.
        fqn: its name in the model.
        filter_fn: the caller's predicate, True to convert.
        skip: glob patterns; one that matches a run of whole segments of ``fqn`` skips the layer.
    """
    if type(module) is not torch.nn.Linear:
        if isinstance(module, Float8Linear):
            return "already converted"
        return f"a subclass of nn.Linear ({type(module).__name__}) whose forward is its own"
    if pattern := next((p for p in skip if matches(p, fqn)), None):
        return f"skip={pattern!r}"
    if filter_fn is not None and not filter_fn(module, fqn):
        return "filter_fn said no"
    sizes = module.in_features, module.out_features
    if any(size % MULTIPLE or not size for size in sizes):
        return f"in_features={sizes[0]}, out_features={sizes[1]}: both have to be multiples of {MULTIPLE}"
    if module.weight.dtype not in HIGH_PRECISION:
        return f"its weight is {module.weight.dtype}"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "its weight is parametrized"
    return None


def matches(pattern: str, fqn: str) -> bool:
    """Whether a glob pattern matches ``fqn`` as a run of whole segments.

    ``"lm_head"`` matches ``model.lm_head`` and ``lm_head.proj``, never ``lm_head2``; ``"layers.0"`` matches
    ``model.layers.0.mlp.up`` and not ``model.layers.01``.
    """
    segments, parts = fqn.split("."), pattern.split(".")
    return any(
        all(fnmatch.fnmatchcase(s, p) for s, p in zip(segments[i : i + len(parts)], parts, strict=True))
        for i in range(len(segments) - len(parts) + 1)
    )
