"""Memory of LoRA over a Llama 3 8B, by what the frozen base is kept as: predicted from shapes, on meta, without a GPU.

python scripts/tables/lora_memory.py --write-docs
"""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers

import f8sub
from scripts.table import Table, finish, parser

GPUS, TOKENS, RANK = 8, 8192, 16
LLAMA_3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SETUPS = {"base in bf16": False, "base as codes alone": True}
"""Whether the base is codes alone."""


def planned(codes: bool) -> torch.nn.Module:
    """The model on meta, where a frozen primary weight counts as the codes that it becomes."""
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_3_8B)).bfloat16()
        f8sub.convert_to_float8(model, "rowwise", primary_weights=codes)
        adapters = peft.LoraConfig(r=RANK, target_modules="all-linear")
        return peft.get_peft_model(model.requires_grad_(False), adapters).bfloat16()


def figures(codes: bool) -> dict[str, float]:
    """GB of one GPU, and of all-gathers in a step."""
    model, found = planned(codes), {}
    for gpus in (1, GPUS):
        told = f8sub.estimate(model, ["rowwise"], gpus=["H200"], tokens=TOKENS, mesh=(gpus,))
        for policy in told.policies:
            found[f"{policy.checkpoint}, {gpus}"] = policy.float8.total / 1e9
            if (policy.checkpoint, gpus) == ("selective", 1):
                parts = {"weights": policy.float8.weights, "optimizer": policy.float8.optimizer}
                found |= {name: size / 1e9 for name, size in parts.items()}
        found["gathered"] = told.wire.gathered / 1e9
    return found


def main() -> None:
    arguments = parser(__doc__, "lora_memory").parse_args()
    found = {name: figures(codes) for name, codes in SETUPS.items()}
    columns = {
        "weights": "weights",
        "optimizer": "optimizer",
        "none, 1": "peak, one GPU, no checkpointing",
        "selective, 1": "selective",
        "full, 1": "full",
        f"selective, {GPUS}": f"{GPUS} GPUs, selective",
        f"full, {GPUS}": "full",
        "gathered": f"all-gathers per step, {GPUS} GPUs",
    }
    rows = [[name, *(f"{row[key]:.1f}" for key in columns)] for name, row in found.items()]
    finish(arguments, found, Table("GB of a Llama 3 8B with adapters", ["GB", *columns.values()], rows))


if __name__ == "__main__":
    main()
