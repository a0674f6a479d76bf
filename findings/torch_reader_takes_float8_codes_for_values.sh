#!/usr/bin/env bash
# torch 2.13.0's QuantizedHuggingFaceStorageReader fills a model with bare codes, or with another block's scales.
#
# It looks for weight_scale_inv next to each weight, takes its block size from an argument (128), and never opens
# config.json. Files of compressed-tensors call their scales weight_scale: the codes are loaded as if they were the weights,
# thousands of times too large. Exponents of one byte (uint8, as MXFP8 files have them) are multiplied by as if they were
# numbers. A file whose config.json says blocks of 64 is read with scales of other blocks. None of it is an error.
#
# Expected: the weights, or an error. Seen: as below; blocks of 128 with float32 scales are exact.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 safetensors==0.8.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import json
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

torch.manual_seed(0)
weight = 0.02 * torch.randn(256, 256) * torch.randn(256, 1).exp()


def quantized(block: int, power_of_2: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = weight.view(256 // block, block, 256 // block, block).abs().amax((1, 3)) / 448
    scale = scale.log2().ceil().exp2() if power_of_2 else scale
    spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * spread


def off(name: str, codes: torch.Tensor, scale: torch.Tensor, values: torch.Tensor, block: int) -> float:
    tensors = {"layer.weight": codes, f"layer.{name}": scale}
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
        Path(folder, "model.safetensors.index.json").write_text(json.dumps(index))
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]}}
        Path(folder, "config.json").write_text(json.dumps(config))
        state = {"layer.weight": torch.zeros(256, 256)}
        dcp.load(state, storage_reader=QuantizedHuggingFaceStorageReader(folder), no_dist=True)
    return ((state["layer.weight"] - values).norm() / values.norm()).item()


codes, scale, values = quantized(128)
seen = {"blocks of 128, weight_scale_inv": off("weight_scale_inv", codes, scale, values, 128)}
seen["the same, called weight_scale"] = off("weight_scale", codes, scale, values, 128)
codes, scale, values = quantized(128, power_of_2=True)
exponents = scale.to(torch.float8_e8m0fnu).view(torch.uint8)
seen["exponents as uint8"] = off("weight_scale_inv", codes, exponents, values, 128)
codes, scale, values = quantized(64)
seen["blocks of 64"] = off("weight_scale_inv", codes, scale, values, 64)
print(f"torch {torch.__version__}: error of the weights that are read, relative")
for name, value in seen.items():
    print(f"{name}: {value:.3g}")
exact, called, uint8, blocks = seen.values()
raise SystemExit(not (exact == 0 and called > 100 and uint8 > 1000 and blocks > 0.05))
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/seen.py"
