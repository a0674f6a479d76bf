#!/usr/bin/env bash
# Llama 3 8B in torchtitan 0.3 with f8sub, as the published runs had it (README.md, beside this); options after the
# script's name win. One node, several, and Slurm:
#
#   recipes/torchtitan/llama3_8b.sh
#   NNODES=4 RDZV_ENDPOINT=node0:29500 recipes/torchtitan/llama3_8b.sh
#   LAUNCHER="sbatch --nodes 4 recipes/launch/slurm.sh" recipes/torchtitan/llama3_8b.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck disable=SC2086  # a launcher may have arguments
exec ${LAUNCHER:-recipes/launch/torchrun.sh} -m torchtitan.train --module f8sub.titan --config llama3_8b_f8sub \
    --training.local_batch_size 2 --training.seq_len 8192 "$@" activation-checkpoint:selective
