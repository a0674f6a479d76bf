"""Mixtures of experts of transformers whose dimensions are whole blocks of 128, and what their forwards multiply."""

from typing import Any
from unittest import mock

import torch
from torch import nn

import f8sub
from f8sub.kernels.grouped import ops
from tests.data_sets import gaussian, generator
from tests.experts.models import DEEPSEEK, SMALL

BF16 = torch.bfloat16
HIDDEN, WIDE, EXPERTS = 256, 128, 4
"""Of the model, of each expert's gate and up, and the number of experts."""

SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "moe_intermediate_size": WIDE,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "head_dim": 128,
    "pad_token_id": 0,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 128,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
OF_EXPERTS = {
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "deepseek_v3": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
}
"""The module of experts, and its gate, up and down, as published checkpoints have them."""


def mixture(kind: str, wide: int = WIDE, layers: int | None = None) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    known = DEEPSEEK if kind == "deepseek_v3" else SMALL
    sizes = {name: SIZES.get(name, value) for name, value in known.items()}
    sizes |= {"moe_intermediate_size": wide, "intermediate_size": wide}
    sizes |= {} if layers is None else {"num_hidden_layers": layers}
    config = AutoConfig.for_model(kind, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=BF16, attn_implementation="eager")
    rng = generator(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * gaussian(tuple(parameter.shape), rng))
    return model


def converted(kind: str, recipe: Any, **sizes: int) -> nn.Module:
    return f8sub.convert_to_float8(mixture(kind, **sizes), recipe=recipe, experts=True)


def multiplied(model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Codes (E, N, K) and scales of the experts' gate and up, and down, that a forward multiplies."""
    found: list[Any] = []
    rows = ops.rows

    def recorded(backend: Any, spec: Any, a: Any, b: Any, *rest: Any) -> torch.Tensor:
        found.append((b.data.clone(), b.scale_inv.clone()))
        return rows(backend, spec, a, b, *rest)

    with mock.patch.object(ops, "rows", recorded), torch.no_grad():
        model(torch.arange(8, dtype=torch.int64).view(1, 8))
    return dict(zip(("gate_up", "down"), found, strict=True))


def by_expert(
    kind: str, codes: dict[str, tuple[torch.Tensor, torch.Tensor]], edge: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Codes and scales of each expert's layers by name; ``edge`` is a scale's number of rows, 0 for all of them."""
    module, (gate, up, down) = OF_EXPERTS[kind]
    found = {}
    for expert in range(EXPERTS):
        at = f"model.layers.0.{module}.experts.{expert}"
        data, scale = (each[expert] for each in codes["gate_up"])
        half, of_half = len(data) // 2, len(data) // 2 // edge if edge else None
        found[f"{at}.{gate}"] = data[:half], scale[:of_half] if edge else scale
        found[f"{at}.{up}"] = data[half:], scale[of_half:] if edge else scale
        found[f"{at}.{down}"] = codes["down"][0][expert], codes["down"][1][expert]
    return found
