#!/usr/bin/env bash
# Llama 3 405B in torchtitan 0.3 with f8sub, as the published runs had it (README.md, beside this): tensor parallelism of
# 8, asynchronous, within a node, 8 pipeline stages, FSDP2 over the rest; options after the script's name win:
#
#   NNODES=64 RDZV_ENDPOINT=node0:29500 recipes/torchtitan/llama3_405b.sh
#   LAUNCHER="sbatch --nodes 64 recipes/launch/slurm.sh" recipes/torchtitan/llama3_405b.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck disable=SC2086  # a launcher may have arguments
exec ${LAUNCHER:-recipes/launch/torchrun.sh} -m torchtitan.train --module f8sub.titan --config llama3_405b_f8sub \
    --training.local_batch_size 32 --training.seq_len 8192 --training.disable_cuda_graphs \
    --parallelism.tensor_parallel_degree 8 --parallelism.pipeline_parallel_degree 8 \
    --parallelism.pipeline_parallel_schedule Interleaved1F1B "$@" activation-checkpoint:full
