#!/usr/bin/env bash
# Llama 3 70B in torchtitan 0.3 with f8sub, as the published runs had it (README.md, beside this): tensor parallelism of
# 8, asynchronous, within a node, FSDP2 over the nodes; options after the script's name win. Several nodes, and Slurm:
#
#   NNODES=32 RDZV_ENDPOINT=node0:29500 recipes/torchtitan/llama3_70b.sh
#   LAUNCHER="sbatch --nodes 32 recipes/launch/slurm.sh" recipes/torchtitan/llama3_70b.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck disable=SC2086  # a launcher may have arguments
exec ${LAUNCHER:-recipes/launch/torchrun.sh} -m torchtitan.train --module f8sub.titan --config llama3_70b_f8sub \
    --training.local_batch_size 16 --training.seq_len 8192 --parallelism.tensor_parallel_degree 8 \
    --compile.enable_async_tensor_parallel "$@" activation-checkpoint:full
