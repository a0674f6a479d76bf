#!/usr/bin/env bash
# Train a small Llama in float8 and in bf16 on this machine, and show the difference. Extra arguments go to the job:
#   ./scripts/quickstart.sh --float8.recipe rowwise --training.steps 200
# VENV=... and CONSTRAINTS=... name another environment, see setup_env.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup_env.sh train

python=${VENV:-.venv}/bin/python
ranks=$($python -c 'import torch; print(torch.cuda.device_count())')
device=cuda
if [ "$ranks" -lt 1 ]; then
    ranks=2 device=cpu
fi
if [ -e runs/quickstart ]; then
    mv runs/quickstart "runs/quickstart-$(date -r runs/quickstart +%Y%m%d-%H%M%S)"
fi
# An interval past the last step saves at the end alone.
echo "Training a small Llama twice on $ranks $device ranks: in float8, then in bf16. Each line shows the time left."
[ $device = cuda ] || echo "On two CPU cores both runs together take about 2 minutes with AVX-512, and 6 without."
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec $python -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    recipes/pretrain.py --job.config_file recipes/pretrain.toml --job.dump_folder runs/quickstart \
    --training.device $device --compare bf16 --float8.monitor_every 20 --checkpoint.interval 1000000 "$@"
