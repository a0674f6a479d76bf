#!/usr/bin/env bash
# One arm of a convergence test, after torchtitan's docs/converging.md: Llama 3 8B, 8 GPUs of FSDP2, a global batch of 32
# sequences of 8192 tokens, 3000 steps of which 600 warm up. Both arms see the same tokens, from the same weights:
#
#   SEED=0 recipes/torchtitan/convergence.sh bf16     # the control: one-dimensional FSDP2, nothing in float8
#   SEED=0 recipes/torchtitan/convergence.sh float8   # all else the same
#
# and so with more seeds; README.md, beside this, says how they are compared.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
case "${1:-}" in
    bf16) arm=(--module llama3 --config llama3_8b --compile.enable --compile.components model) ;;
    float8) arm=(--module f8sub.titan --config llama3_8b_f8sub) ;;
    *)
        echo "convergence.sh: which arm, bf16 or float8?" >&2
        exit 2
        ;;
esac
seed=${SEED:-0}
folder=runs/torchtitan/convergence_$1_seed$seed
shift
# shellcheck disable=SC2086  # a launcher may have arguments
exec ${LAUNCHER:-recipes/launch/torchrun.sh} -m torchtitan.train "${arm[@]}" --dump_folder "$folder" \
    --training.local_batch_size 4 --training.global_batch_size 32 --training.seq_len 8192 --training.steps 3000 \
    --lr_scheduler.warmup_steps 600 --debug.seed "$seed" --debug.deterministic \
    --metrics.enable_tensorboard --metrics.log_freq 10 "$@" activation-checkpoint:selective
