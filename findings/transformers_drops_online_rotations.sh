#!/usr/bin/env bash
# transformers 5.24.0 with compressed-tensors 0.20.0: a checkpoint with online rotations is loaded as another model.
#
# compressed-tensors can rotate a layer's weight and, while the model runs, its input by the inverse, so that quantization
# loses less; the function is the same. It writes the rotated weight, and the rotation as transform_config. transformers'
# loader passes the quantization on and not the transform: no input is rotated, and nothing is said.
#
# Expected: the output before saving, within float8's error of 3 %. Seen: relative differences over 30 %, without an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 compressed-tensors==0.20.0 accelerate==1.15.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import tempfile
from importlib.metadata import version

import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.transform import TransformArgs, TransformConfig, TransformScheme, apply_transform_config
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
sizes = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_hidden_layers=1, vocab_size=64)
ids = torch.arange(16)[None]


@torch.no_grad()
def output(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(ids).logits


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def run(rotated: bool) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    expected = output(model)
    if rotated:
        layers = ["re:.*down_proj$"]
        of_input = TransformArgs(targets=layers, location="input")
        of_weight = TransformArgs(targets=layers, location="weight_input", inverse=True)
        scheme = TransformScheme(type="hadamard", apply=[of_input, of_weight])
        apply_transform_config(model, TransformConfig(config_groups={"R4": scheme}))
    weights = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    config = QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head"], format="float-quantized", quantization_status="frozen"
    )
    apply_quantization_config(model, config)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                module.weight_scale.copy_(module.weight.abs().amax(1, keepdim=True) / 448)
    quantized = off(output(model), expected)
    with tempfile.TemporaryDirectory() as folder:
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(folder)
        loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [quantized, off(output(loaded), expected)]


seen = {rotated: run(rotated) for rotated in (False, True)}
print(f"torch {torch.__version__}, transformers {transformers.__version__}, compressed-tensors {version('compressed-tensors')}")
for rotated, (before, after) in seen.items():
    print(f"{'rotated' if rotated else 'plain'}: output off by {before:.3f} before saving, {after:.3f} after loading")
(plain, plain_loaded), (turned, turned_loaded) = seen[False], seen[True]
raise SystemExit(not (max(plain, plain_loaded, turned) < 0.06 and turned_loaded > 0.3))
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/seen.py"
