#!/usr/bin/env bash
# torchao 0.18.0 and compressed-tensors 0.20.0: the same MXFP8 block gets another exponent by each, and one cuts its maximum.
#
# The format fixes the codes (e4m3, up to 448) and the scale's type (a power of two), and leaves the rule open. torchao's
# MXTensor.to_mx takes the floor by default, so that maxima between 448 and 512 are cut to 448, up to 12.5 %; torchao's own
# configs for training and inference pass another rule, and keep them. compressed-tensors rounds the maximum first, and
# doubles the scale of a block whose maximum is exactly 448, which e4m3 holds. So codes of one library that are compared
# with, or cast again by, the other differ in blocks that no outlier is in, and a test at amax 1 shows nothing.
#
# Expected: one rule. Seen at 500: 448 by torchao's function, 512 by its configs' rule. Seen at 448: scales 1, 1 and 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 torchao==0.18.0 compressed-tensors==0.20.0 transformers==5.24.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import logging
import warnings
from importlib.metadata import version

import torch

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.prototype.mx_formats.mx_tensor import MXTensor

group = dict(strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8, zp_dtype=torch.float8_e4m3fn)
arguments = QuantizationArgs(num_bits=8, type="float", **group)


def by_torchao(block: torch.Tensor, **rule: object) -> tuple[float, float]:
    found = MXTensor.to_mx(block, torch.float8_e4m3fn, 32, **rule)
    return found.scale.float().item(), found.dequantize().max().item()


def by_compressed_tensors(block: torch.Tensor) -> tuple[float, float]:
    scale, zero = calculate_qparams(block.amin(-1, keepdim=True), block.amax(-1, keepdim=True), arguments)
    return scale.float().item(), fake_quantize(block, scale, zero, arguments).max().item()


print(f"torchao {version('torchao')}, compressed-tensors {version('compressed-tensors')}: (scale, largest value)")
seen = {}
for largest in (448.0, 500.0):
    block = torch.zeros(1, 32)
    block[0, 0] = largest
    rule = {"scaling_mode": MXFP8TrainingOpConfig.__dataclass_fields__["scale_calculation_mode"].default}
    seen[largest] = by_torchao(block), by_torchao(block, **rule), by_compressed_tensors(block)
    print(f"{largest}: to_mx {seen[largest][0]}, rule of torchao's config {seen[largest][1]}, compressed-tensors {seen[largest][2]}")
expected = {
    448.0: ((1.0, 448.0), (1.0, 448.0), (2.0, 448.0)),
    500.0: ((1.0, 448.0), (2.0, 512.0), (2.0, 512.0)),
}
raise SystemExit(seen != expected)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/seen.py"
