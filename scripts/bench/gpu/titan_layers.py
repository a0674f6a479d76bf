"""What torchtitan 0.2 lacks for benchmarks, by ``--experimental.custom_import=scripts.bench.gpu.titan_layers``.

Flavors: ``8B-1``, ``8B-2``, ``8B-4``, ``8B-8`` and ``8B-16`` are Llama 3 8B with as many of its 32 layers, and
``30B-A3B-2``, ``-4`` and ``-8``, with ``--model.name=qwen3``, Qwen3-30B-A3B with as many of its 48.

The converter ``torchao_experts``: torchtitan's own imports a name that torchao 0.18 has no more.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.moe.utils import set_token_group_alignment_size_m
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.protocols.model_converter import register_model_converter

llama3_args |= {
    f"8B-{layers}": dataclasses.replace(llama3_args["8B"], n_layers=layers) for layers in (1, 2, 4, 8, 16)
}
qwen3_args |= {
    f"30B-A3B-{layers}": dataclasses.replace(qwen3_args["30B-A3B"], n_layers=layers) for layers in (2, 4, 8)
}


class TorchaoExperts:
    """Experts by torchao, as ``Float8GroupedMMConverter`` of torchtitan 0.2 converts them."""

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        set_token_group_alignment_size_m(
            16
        )  # rows of codes that a product of groups needs, by torchtitan's converter

    def convert(self, model: torch.nn.Module) -> None:
        """Give the experts torchao's weights, whose products are float8 with a scale of each row."""
        from torchao.prototype.moe_training.config import Float8TrainingOpConfig
        from torchao.quantization.quant_api import quantize_

        quantize_(model, Float8TrainingOpConfig(), filter_fn=lambda module, fqn: fqn.endswith(".experts"))

    def post_optimizer_hook(self, model: Any) -> None:
        """Nothing."""


register_model_converter(TorchaoExperts, "torchao_experts")
