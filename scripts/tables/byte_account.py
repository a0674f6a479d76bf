"""The bytes of a Llama's linear layers in float8 and in bf16: weights, all-gather, saved for backward, transient.

Predicted, on the meta device, for the GEMMs of an H200: no GPU needed. What is predicted is held to what is measured
by tests/diagnostics/test_byte_account.py and tests/diagnostics/ranks/test_byte_account.py.

    python scripts/tables/byte_account.py --recipe blockwise --keep-x float8
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import f8sub
from f8sub.linear.saved_input import KEEP_X
from scripts.table import ROOT, provenance, write_between_markers
from scripts.tables.byte_lab import TOKENS, plan_for_the_device

sys.path.insert(0, str(ROOT / "recipes"))

from f8sub_pretrain.model import SIZES


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--size", choices=SIZES, default="8b")
    options.add_argument("--recipe", choices=f8sub.recipe_names(), default="tensorwise")
    options.add_argument("--keep-x", choices=KEEP_X, default="auto")
    options.add_argument("--tokens", type=int, default=TOKENS)
    options.add_argument("--write-docs", action="store_true", help="put the table into its page")
    arguments = options.parse_args()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES[arguments.size], vocab_size=128256))
    f8sub.convert_to_float8(model, recipe=arguments.recipe, keep_x=arguments.keep_x)
    plan_for_the_device(model)
    text = str(f8sub.conversion_report(model, arguments.tokens).bytes)
    print(text)
    if arguments.write_docs:
        write_between_markers("byte_account", f"```\n{text}\n```\n\n{provenance()}")


if __name__ == "__main__":
    main()
