"""LoRA over a float8 base with PEFT and transformers' ``Trainer``: the frozen base is codes alone, 1 byte per element.

    python recipes/trainers/lora.py

Adapters stay in high precision. Merged into the base at the end, the sum is cast to float8 anew.
"""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers
from f8sub_example import Tokens, build_model

import f8sub


def build() -> Any:
    """A float8 base without high-precision values, and adapters over all of its layers."""
    model = f8sub.convert_to_float8(build_model().bfloat16(), recipe="rowwise", primary_weights=True)
    model.requires_grad_(False)
    f8sub.drop_high_precision(model)  # after the pretrained weights were loaded
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))


def train(model: Any, steps: int, folder: str) -> list[float]:
    """The losses of the adapters' training."""
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Tokens())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def merge(model: Any) -> Any:
    """The base with the adapters in it: a model of float8 layers without PEFT."""
    f8sub.restore_high_precision(model)
    return model.merge_and_unload()


def main() -> None:
    """Train adapters, save them, and merge them."""
    model = build()
    model.print_trainable_parameters()
    with f8sub.prefer_cudnn_attention():  # where it is the fastest; in the bf16 run, too
        losses = train(model, 50, "runs/lora")
    model.save_pretrained("runs/lora/adapter")
    merged = merge(model)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; merged: {f8sub.conversion_report(merged).summary}")


if __name__ == "__main__":
    main()
