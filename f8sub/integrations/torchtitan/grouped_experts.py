"""Experts of torchtitan 0.2, whose own forward multiplies in a function that no module could replace."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.models.moe.moe import GroupedExperts

from f8sub.experts.grouped_linear import grouped_linear
from f8sub.experts.seams import register_experts


def gate(h: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU of the results of w1 and w3."""
    return F.silu(h) * up


def register_grouped_experts(backend: str | None) -> None:
    """Have ``convert_to_float8(model, experts=True)`` convert ``GroupedExperts``.

    torchtitan pads each expert's tokens for torch's grouped product; f8sub's takes groups of any size.

    Args:
        backend: of ``torch.compile`` for what lies between the products, as torchtitan has it for all of its own
            function; None where it compiles no model.
    """
    gated: Callable[..., Any] = (
        gate if backend is None else torch.compile(gate, backend=backend, fullgraph=True)
    )

    def forward(module: Any, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        ends = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        h = gated(grouped_linear(x, module.w1, ends), grouped_linear(x, module.w3, ends))
        return grouped_linear(h, module.w2, ends).type_as(x)

    register_experts(GroupedExperts, weights=("w1", "w2", "w3"), forward=forward)
