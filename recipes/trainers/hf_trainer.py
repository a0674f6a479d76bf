"""Float8 in the Trainer of transformers.

    torchrun --nproc-per-node gpu recipes/trainers/hf_trainer.py

It shards through accelerate, and so on GPUs and their like alone, not on CPUs.
"""

from __future__ import annotations

from typing import Any

from f8sub_example import BLOCK, Tokens, build_model
from transformers import Trainer, TrainingArguments

import f8sub
from f8sub.integrations.transformers import Float8Callback


def arguments(folder: str, **options: Any) -> TrainingArguments:
    """FSDP2 in bf16 and a checkpoint now and then; ``options`` are the Trainer's."""
    chosen: dict[str, Any] = {
        "output_dir": folder,
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": [BLOCK],
            "state_dict_type": "SHARDED_STATE_DICT",
        },
        "bf16": True,
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-3,
        "max_steps": 50,
        "save_steps": 25,
        "logging_steps": 10,
        "report_to": "none",
    }
    return TrainingArguments(**{**chosen, **options})


def build_trainer(options: TrainingArguments) -> Trainer:
    """A Trainer in float8; the callback converts the model, and reports it."""
    callback = Float8Callback("tensorwise")
    return Trainer(model=build_model(), args=options, train_dataset=Tokens(), callbacks=[callback])


def main() -> None:
    """Train, saving on the way."""
    trainer = build_trainer(arguments("runs/hf_trainer"))
    with f8sub.prefer_cudnn_attention():  # where it is the fastest; in the bf16 run, too
        trainer.train()


if __name__ == "__main__":
    main()
