#!/usr/bin/env bash
# transformers 5.24.0 with schedulefree 1.4.1: what Trainer saves depends on whether an evaluation came before.
#
# A schedule-free optimizer has two sets of weights: those that gradients are taken at, and their average, which is the
# result. The Trainer calls optimizer.train() before each step and optimizer.eval() before an evaluation, and no eval()
# before it saves. So checkpoints and save_model() have the average only where an evaluation was the last thing before.
# With eval_strategy="no" every file has the weights that nobody is meant to use. The loss of the run does not show it.
#
# Expected: the same file from the same steps. Seen: the average with an evaluation at the last step, other weights without.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 schedulefree==1.4.1 numpy

cat >"$folder/seen.py" <<'PYTHON'
import tempfile
from importlib.metadata import version

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=64)
torch.manual_seed(0)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (32, 8))]


def saved_is_the_average(evaluate: bool) -> bool:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=6,
            optim="schedule_free_adamw",
            lr_scheduler_type="constant",
            learning_rate=1e-2,
            save_steps=6,
            eval_strategy="steps" if evaluate else "no",
            eval_steps=6,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8])
        trainer.train()
        saved = LlamaForCausalLM.from_pretrained(f"{folder}/checkpoint-6").lm_head.weight
        optimizer = trainer.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        optimizer.eval()
        return torch.equal(saved, model.lm_head.weight)


seen = {evaluate: saved_is_the_average(evaluate) for evaluate in (True, False)}
print(f"torch {torch.__version__}, transformers {transformers.__version__}, schedulefree {version('schedulefree')}")
print(f"checkpoint-6 has the average: evaluated at step 6 {seen[True]}, not evaluated {seen[False]}")
raise SystemExit(seen != {True: True, False: False})
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/seen.py"
