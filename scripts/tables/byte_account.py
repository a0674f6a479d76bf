"""The bytes of a Llama's linear layers in float8 and in bf16: weights, all-gather, saved for backward, transient.

Predicted, on the meta device, for the GEMMs of an H200: no GPU needed. What is predicted is held to what is measured
by tests/diagnostics/test_byte_account.py and tests/diagnostics/ranks/test_byte_account.py.

    python scripts/tables/byte_account.py --recipe blockwise --keep-x float8
"""

from __future__ import annotations

import sys
from typing import Literal

import torch
import tyro
from transformers import LlamaConfig, LlamaForCausalLM

import f8sub
from f8sub.linear.saved_input import KEEP_X
from scripts.table import ROOT, provenance, write_between_markers
from scripts.tables.byte_lab import TOKENS, plan_for_the_device

sys.path.insert(0, str(ROOT / "recipes"))

from f8sub_pretrain.model import SIZES


def main(
    size: Literal[tuple(SIZES)] = "8b",
    recipe: Literal[tuple(f8sub.recipe_names())] = "tensorwise",
    keep_x: Literal[KEEP_X] = "auto",
    tokens: int = TOKENS,
    write_docs: bool = False,
) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES[size], vocab_size=128256))
    f8sub.convert_to_float8(model, recipe=recipe, keep_x=keep_x)
    plan_for_the_device(model)
    text = str(f8sub.conversion_report(model, tokens).bytes)
    print(text)
    if write_docs:
        write_between_markers("byte_account", f"```\n{text}\n```\n\n{provenance()}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
