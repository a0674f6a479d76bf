"""Float8 in TRL: supervised fine-tuning, and GRPO whose engine gets the training's own float8 weights.

    python recipes/trainers/trl_sft_grpo.py

Both trainers are the Trainer of transformers, so one callback is all. In GRPO a second callback sends the weights to an
engine after every step, at 1 byte per element and without a second cast, as rl_weight_sync.py does under FSDP2.
"""

from __future__ import annotations

from typing import Any

import datasets
import torch
import transformers
import trl
from f8sub_engine import Engine
from f8sub_example import VOCABULARY, Tokens, build_model
from tokenizers import Tokenizer, models, pre_tokenizers

import f8sub
from f8sub.integrations.transformers import Float8Callback

QUIET: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def build_tokenizer() -> Any:
    """A tokenizer of numbers."""
    words = {str(number): number for number in range(VOCABULARY - 2)}
    words |= {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def build_sft(folder: str, steps: int, **options: Any) -> trl.SFTTrainer:
    """Supervised fine-tuning in float8; ``options`` are TRL's."""
    tokens = Tokens()
    return trl.SFTTrainer(
        build_model(),
        args=trl.SFTConfig(folder, max_steps=steps, **{**QUIET, **options}),
        train_dataset=datasets.Dataset.from_list(
            [{"input_ids": tokens[index]["input_ids"].tolist()} for index in range(256)]
        ),
        processing_class=build_tokenizer(),
        callbacks=[Float8Callback("tensorwise")],
    )


class SendWeights(transformers.TrainerCallback):
    """Sends the float8 weights to an engine after every step, under names of a compressed-tensors checkpoint."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Stream the weights as they are after the step, in the codes of a forward under the Trainer's autocast."""
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        self.engine.load_weights(f8sub.float8_weights(given["model"], "compressed-tensors", dtype=dtype))


def even(completions: list[str], **given: Any) -> list[float]:
    """Reward even numbers."""
    return [sum(int(word) % 2 == 0 for word in text.split() if word.isdigit()) / 8 for text in completions]


def build_grpo(folder: str, steps: int, engine: Engine, **options: Any) -> trl.GRPOTrainer:
    """GRPO in float8, with an engine whose weights follow; ``options`` are TRL's."""
    return trl.GRPOTrainer(
        build_model(),
        reward_funcs=even,
        args=trl.GRPOConfig(
            folder, max_steps=steps, num_generations=4, max_completion_length=8, **{**QUIET, **options}
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"{i} {i + 1} {i + 2}"} for i in range(64)]),
        processing_class=build_tokenizer(),
        callbacks=[Float8Callback("rowwise"), SendWeights(engine)],
    )


def main() -> None:
    """Train in both ways."""
    with f8sub.prefer_cudnn_attention():  # where it is the fastest; in the bf16 run, too
        build_sft("runs/trl_sft", 50).train()
        engine = Engine()
        build_grpo("runs/trl_grpo", 20, engine).train()
    print(f"{engine.bytes:,} bytes sent per step")


if __name__ == "__main__":
    main()
