#!/usr/bin/env bash
# transformers 5.24.0: with bf16_full_eval=True an evaluate() before train() has the training run in bfloat16.
#
# `bf16=True` trains float32 weights and computes in bfloat16. `bf16_full_eval=True` "uses full bfloat16 evaluation instead
# of 32-bit", and a first evaluate() gives the loss to compare with. One would guess that the weights are cast for the
# evaluation and cast back. `evaluate()` and `predict()` cast the model itself, and leave it so: the optimizer then holds
# bfloat16 weights and moments, and at a fine-tuning rate most updates round to nothing. Evaluations inside of training
# do not cast. Nothing is logged, and a model that is saved after a last evaluate() is in bfloat16 too.
#
# Expected: the same training with and without that evaluation. Seen: 99 % of the weights change in three steps without
# it, 4 to 15 % with it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
transformers.logging.set_verbosity_error()


def trained(evaluates_first: bool) -> tuple[float, torch.dtype, torch.dtype]:
    """The share of weights that three steps changed, the dtype of the weights, and that of the moments."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES))
    data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (32, 16))]
    arguments = TrainingArguments(
        sys.argv[1], max_steps=3, bf16=True, bf16_full_eval=True, learning_rate=1e-5, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8])
    if evaluates_first:
        trainer.evaluate()
    before = [p.detach().float().clone() for p in model.parameters()]
    trainer.train()
    changed = sum(int((a != p.detach().float()).sum()) for a, p in zip(before, model.parameters(), strict=True))
    moments = next(iter(trainer.optimizer.state.values()))["exp_avg"].dtype
    return changed / sum(p.numel() for p in model.parameters()), model.lm_head.weight.dtype, moments


print(f"transformers {transformers.__version__}, torch {torch.__version__}, bf16=True, bf16_full_eval=True")
found = {}
for first in (False, True):
    found[first] = trained(first)
    share, weights, moments = found[first]
    print(f"evaluate() first: {first}; {share:.1%} of the weights changed, weights {weights}, moments {moments}")
float32, bf16 = torch.float32, torch.bfloat16
as_seen = found[False][0] > 0.9 and found[True][0] < 0.3
raise SystemExit(not (as_seen and found[False][1:] == (float32, float32) and found[True][1:] == (bf16, bf16)))
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/seen.py" "$folder/runs"
