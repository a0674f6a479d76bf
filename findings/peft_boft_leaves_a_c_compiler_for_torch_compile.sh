#!/usr/bin/env bash
# PEFT 0.21.2 and torch 2.13.0: after a BOFT adapter, torch.compile on a CPU fails in each process that is started.
#
# BOFT tries to build a CUDA extension with CC and CXX set to gcc for that time. Where the build fails, as without CUDA's
# compiler, PEFT warns and goes on, and the two variables stay. Processes that are started from there (ranks, workers, an
# evaluation) inherit them. Inductor takes its C++ compiler from CXX when it is first imported, and gcc does not link
# libstdc++: generated code that needs that library, as dropout's does, is compiled and cannot be loaded. LoRA on the
# same model leaves nothing.
#
# Expected: the environment as before. Seen: CC=CXX=gcc, and an undefined symbol in a child's error. Needs gcc and g++.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 peft==0.21.2 transformers==5.24.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import os
import subprocess
import sys
import warnings

import peft
from torch import nn

warnings.filterwarnings("ignore")
CHILD = "import torch; torch.compile(torch.nn.functional.dropout)(torch.ones(64))"
kind = sys.argv[1]
config = {"lora": peft.LoraConfig, "boft": peft.BOFTConfig}[kind](target_modules=["0"])
peft.get_peft_model(nn.Sequential(nn.Linear(64, 64)), config)
child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
result = "compiles" if child.returncode == 0 else "fails"
result = "undefined symbol" if "undefined symbol" in child.stderr else result
compilers = os.environ.get("CC"), os.environ.get("CXX")
print(f"{kind}: CC={compilers[0]} CXX={compilers[1]}, torch.compile in a child: {result}", flush=True)
expected = {"lora": ((None, None), "compiles"), "boft": (("gcc", "gcc"), "undefined symbol")}[kind]
raise SystemExit((compilers, result) != expected)
PYTHON
unset CC CXX CUDA_HOME
for kind in lora boft; do
    TORCHINDUCTOR_CACHE_DIR="$folder/$kind" "$folder/venv/bin/python" "$folder/seen.py" "$kind"
done
