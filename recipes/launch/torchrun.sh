#!/usr/bin/env bash
# Start one node's ranks of a job of several nodes: the same line on every node, whichever comes first.
#
#   NNODES=4 RDZV_ENDPOINT=node0:29500 recipes/launch/torchrun.sh recipes/pretrain.py --model.size 8b --compile.enabled true
#
#   NNODES          how many nodes there are; 2:4 for two to four, as they come and go (1)
#   NPROC_PER_NODE  ranks a node: a number, or gpu for one a GPU (gpu)
#   RDZV_ENDPOINT   host:port of one of the nodes, where all of them meet (localhost:29500)
#   RDZV_ID         a name that jobs which share an endpoint do not share (f8sub)
#   MAX_RESTARTS    how often the ranks are started again after one of them failed (0); pretrain.py then goes on from
#                   its last checkpoint, with --checkpoint.interval 500 --checkpoint.resume newest
#   PYTHON          the Python to run (.venv/bin/python where it is there, else python3)
#
# Every node needs the same checkout and the same data, and --job.dump_folder on a file system that all nodes share.
#
# What follows is read by NCCL, gloo and PyTorch themselves. Unset it has their defaults, which are where to begin:
#
#   NCCL_MAX_CTAS=16, or 8  when a profile shows the float8 GEMMs of a layer waiting while the next layer's all-gather
#       runs: NCCL's kernels hold SMs, and this is the most that each may take. 16 and 8 are what helped Llama 3 70B on
#       128 H100 [1]. NCCL 2.17 or newer; fewer slow the all-gather down, so measure the step, not the GEMMs [2].
#   NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME  the network interface, when nodes have several and the first is a wrong one:
#       ranks that cannot reach each other wait in init_process_group until its timeout [2].
#   NCCL_IB_HCA  the InfiniBand or RoCE adapters, when only some of them lead to the other nodes [2].
#   NCCL_DEBUG=INFO  to see which network and how many channels NCCL chose, in the first run on a new cluster [2].
#   OMP_NUM_THREADS  threads of a rank on the CPU; torchrun sets 1 where it is not set.
#
# In [1], Llama 3 70B on 128 H100 became 1.40 times as fast as bf16 with float8 GEMMs and a bf16 all-gather
# (--float8.all_gather false here), 1.42 with a float8 all-gather and an all-reduce for each weight, and 1.50 with one
# all-reduce for all of them, which is precompute_scales: pretrain.py calls it. There torch.compile is on
# (--compile.enabled true), and layers too small to gain stay in bf16 (by default).
#
# [1] Enabling Float8 All-Gather in FSDP2, https://dev-discuss.pytorch.org/t/enabling-float8-all-gather-in-fsdp2/2359
# [2] https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [ $# = 0 ]; then
    echo "torchrun.sh: no program to run; for example recipes/pretrain.py --model.size 1b" >&2
    exit 2
fi
if [ -z "${PYTHON:-}" ]; then
    PYTHON=.venv/bin/python
    [ -x $PYTHON ] || PYTHON=python3
fi
# Else ranks that are started again read from torchrun's store where those before them could be reached:
# https://github.com/pytorch/pytorch/issues/135712, still so in 2.13.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "$PYTHON" -m torch.distributed.run \
    --nnodes "${NNODES:-1}" --nproc-per-node "${NPROC_PER_NODE:-gpu}" --max-restarts "${MAX_RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-endpoint "${RDZV_ENDPOINT:-localhost:29500}" --rdzv-id "${RDZV_ID:-f8sub}" "$@"
