#!/usr/bin/env bash
# PEFT 0.21.2 and torch 2.13.0: after a BOFT adapter, torch.compile on a CPU fails with "undefined symbol".
#
# BOFT tries to build a CUDA extension with CC and CXX set to gcc for that time. Where the build fails, as without CUDA's
# compiler, PEFT warns and goes on, and the two variables stay. torch.compile takes its C++ compiler from CXX, which gcc
# is not: it compiles, and does not link libstdc++. Generated code that needs that library, as dropout's does, cannot be
# loaded: in this process, if it had not imported Inductor before, and in each process that it starts. LoRA on the same
# model leaves nothing.
#
# Expected: the environment as before. Seen: CC=CXX=gcc, and an undefined symbol in an error. Needs g++ and gcc.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 peft==0.21.2 transformers==5.24.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import os
import sys
import warnings

import peft
import torch
from torch import nn

warnings.filterwarnings("ignore")
kind = sys.argv[1]
config = {"lora": peft.LoraConfig, "boft": peft.BOFTConfig}[kind](target_modules=["0"])
peft.get_peft_model(nn.Sequential(nn.Linear(64, 64)), config)
try:
    torch.compile(nn.functional.dropout)(torch.ones(64))
    result = "compiles"
except Exception as error:
    result = "undefined symbol" if "undefined symbol" in str(error) else f"another error: {error}"
print(f"{kind}: CC={os.environ.get('CC')} CXX={os.environ.get('CXX')}, torch.compile: {result}", flush=True)
PYTHON
unset CC CXX CUDA_HOME
for kind in lora boft; do
    TORCHINDUCTOR_CACHE_DIR="$folder/$kind" "$folder/venv/bin/python" "$folder/seen.py" "$kind" | tee -a "$folder/seen"
done
grep -qx 'lora: CC=None CXX=None, torch.compile: compiles' "$folder/seen"
grep -qx 'boft: CC=gcc CXX=gcc, torch.compile: undefined symbol' "$folder/seen"
