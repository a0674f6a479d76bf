#!/usr/bin/env bash
# transformers 5.24.0: Trainer resumes a mixture of experts with the experts that the model had before the resume.
#
# A mixture has one tensor for all experts of a layer, and its file one for each expert: save_pretrained splits them, and
# from_pretrained puts them together. The Trainer writes its checkpoints by the first, and reads them by
# model.load_state_dict(..., strict=False), which knows no such names. So a new process that calls
# train(resume_from_checkpoint=True) goes on with the optimizer's moments, all other weights, and experts that are not
# trained. With load_best_model_at_end the last step's experts stay beside the best step's other weights. Both log a
# warning of missing keys, and raise no error.
#
# Expected: the loss goes on as without the interruption, as it does for a Llama. Seen: it does not. It does after the
# model was loaded by from_pretrained(checkpoint).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import sys

import torch
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
ARCHITECTURES = {
    "Llama": (LlamaForCausalLM, LlamaConfig(intermediate_size=128, **SIZES)),
    "Mixtral": (MixtralForCausalLM, MixtralConfig(intermediate_size=64, num_local_experts=4, **SIZES)),
    "Qwen3-MoE": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=16, **SIZES),
    ),
}
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.manual_seed(0)
DATA = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (64, 16))]


def losses(model, folder: str, steps: int, resumes: bool = False) -> list[float]:
    arguments = TrainingArguments(
        folder, max_steps=steps, save_steps=4, logging_steps=1, learning_rate=1e-2, lr_scheduler_type="constant",
        use_cpu=True, report_to="none", disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=DATA)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resumes)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def new(kind):
    cls, config = ARCHITECTURES[kind]
    torch.manual_seed(1)
    return cls(config)


print(f"transformers {transformers.__version__}, torch {torch.__version__}; losses of steps 5 to 8")
equal = {}
for kind, (cls, _) in ARCHITECTURES.items():
    folder = f"{sys.argv[1]}/{kind}"
    whole = losses(new(kind), f"{folder}/whole", 8)[4:]
    losses(new(kind), f"{folder}/parts", 4)
    resumed = losses(new(kind), f"{folder}/parts", 8, resumes=True)[4:]
    losses(new(kind), f"{folder}/loaded", 4)
    loaded = losses(cls.from_pretrained(f"{folder}/loaded/checkpoint-4"), f"{folder}/loaded", 8, resumes=True)[4:]
    equal[kind] = whole == resumed, whole == loaded
    for what, found in (("uninterrupted", whole), ("resumed", resumed), ("from_pretrained, then resumed", loaded)):
        print(f"{kind:10} {what:30} {', '.join(f'{loss:.4f}' for loss in found)}")
raise SystemExit(equal != {"Llama": (True, True), "Mixtral": (False, True), "Qwen3-MoE": (False, True)})
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/seen.py" "$folder/runs"
