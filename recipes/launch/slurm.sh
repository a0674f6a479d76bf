#!/usr/bin/env bash
# A Slurm job of several nodes: torchrun.sh, beside this, on each of them. Submit it from the top of the repository;
# options of sbatch before the script win over those here, and what torchrun.sh reads from the environment comes along:
#
#   NCCL_MAX_CTAS=16 sbatch --nodes 16 recipes/launch/slurm.sh recipes/pretrain.py --model.size 8b
#
#SBATCH --job-name=f8sub
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=f8sub-%j.log
# Two minutes before the time is up the ranks get SIGTERM; pretrain.py saves, and ends, after the next step.
#SBATCH --signal=TERM@120
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?is set by sbatch: submit this script with sbatch}"

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export NNODES=$SLURM_JOB_NUM_NODES RDZV_ID=$SLURM_JOB_ID
# Jobs that share a node do not share its ports.
export RDZV_ENDPOINT=${nodes%%$'\n'*}:$((20000 + SLURM_JOB_ID % 10000))
exec srun --kill-on-bad-exit=1 recipes/launch/torchrun.sh "$@"
