"""Models with experts: small ones of transformers, and modules whose every expert is a Float8Linear."""

import types
from typing import Any

import torch
from torch import nn

import f8sub
from tests.data_sets import gaussian, generator

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "n_routed_experts": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DEEPSEEK = {
    **{name: value for name, value in SMALL.items() if name != "head_dim"},
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
MODELS = {"mixtral": SMALL, "qwen3_moe": SMALL, "deepseek_v3": DEEPSEEK, "gpt_oss": SMALL}


def of_transformers(kind: str, implementation: str = "grouped_mm") -> nn.Module:
    """A model of one layer; the same weights every time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **MODELS[kind])
    config._experts_implementation = implementation
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    rng = generator(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * gaussian(tuple(parameter.shape), rng))
    return model


def experts_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def judged_by_expert(model: nn.Module, recipe: str) -> nn.Module:
    """Give every module of experts of transformers a forward that calls a Float8Linear for each expert."""
    for module in experts_of(model):
        module.forward = types.MethodType(lambda *given: _by_expert(*given, recipe), module)
    return model


def layer_of(weight: torch.Tensor, recipe: str) -> Any:
    """``x -> y`` of a Float8Linear over one expert's weight, which gets the gradient."""
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer = f8sub.convert_to_float8(plain, recipe, skip_defaults=False, backend="reference")
    return lambda x: torch.func.functional_call(layer, {"weight": weight}, (x,))


def _by_expert(
    module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, recipe: str
) -> torch.Tensor:
    chosen = [(index == expert).nonzero() for expert in range(module.num_experts)]
    token, slot = torch.cat(chosen).unbind(1)
    parts = hidden[token].split([len(each) for each in chosen])
    found = []
    for expert, x in enumerate(parts):
        if not len(x):
            continue

        def multiplied(name: str, x: torch.Tensor, expert: int = expert) -> torch.Tensor:
            weight = getattr(module, name)[expert]
            y = layer_of(weight.t() if module.is_transposed else weight, recipe)(x)
            return y + getattr(module, f"{name}_bias")[expert] if module.has_bias else y

        found.append(multiplied("down_proj", module._apply_gate(multiplied("gate_up_proj", x))))
    scaled = torch.cat(found) * weights[token, slot][:, None]
    slots = scaled.new_zeros((*index.shape, hidden.shape[1]))
    return slots.index_put((token, slot), scaled).sum(1).to(hidden.dtype)


class OwnExperts(nn.Module):
    """A user's gate, up and down, which call ``grouped_linear``."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        rng = generator(3)
        self.gate, self.up = (
            nn.Parameter(gaussian((experts, hidden, width), rng) / width**0.5) for _ in range(2)
        )
        self.down = nn.Parameter(gaussian((experts, width, hidden), rng) / hidden**0.5)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        h = nn.functional.silu(f8sub.grouped_linear(x, self.gate, ends))
        return f8sub.grouped_linear(h * f8sub.grouped_linear(x, self.up, ends), self.down, ends)
