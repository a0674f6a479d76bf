#!/usr/bin/env bash
# torch 2.13.0: compiled code of dynamic shapes gives wrong numbers where Inductor finds code of a narrower matrix on disk.
#
# A function pads a matrix to blocks of 128 x 128 and takes the largest element of each block, compiled with dynamic=True.
# A job has run it with a matrix that is one block wide. A later job, here after torch._dynamo.reset(), runs it with one
# that is two blocks wide. One would guess that the shape is dynamic, or that a guard sends it to code of its own, as it
# does with an empty cache folder. But code on disk is found by its graph and guards, and no guard says
# that -n % 128 made one block: the code of one block runs, and the second block's result is of no element of the matrix.
#
# Expected: the numbers of eager code both times. Seen: those with an empty folder; with the folder of the first matrix
# another number or NaN in the second block, which changes from run to run.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import os
import tempfile

import torch
import torch.nn.functional as F


def largest_of_blocks(x: torch.Tensor) -> torch.Tensor:
    finite = torch.where(x.abs() < float("inf"), x.abs(), 0.0)
    down = F.pad(finite, (0, 0, 0, -finite.shape[0] % 128)).unflatten(0, (-1, 128)).amax(1)
    return F.pad(down, (0, -down.shape[1] % 128)).unflatten(1, (-1, 128)).amax(2)


def run(rows: int, cols: int) -> tuple[list[float], list[float]]:
    """Results of compiled and of eager code."""
    torch._dynamo.reset()
    # Columns of a wider matrix, so that its strides are not its own.
    x = torch.randn(rows, 2 * cols, generator=torch.Generator().manual_seed(1))[:, :cols]
    compiled = torch.compile(largest_of_blocks, dynamic=True, fullgraph=True)
    return compiled(x).flatten().tolist(), largest_of_blocks(x).flatten().tolist()


print(f"torch {torch.__version__}")
equal = {}
for narrow_first in (False, True):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=os.environ["FOLDER"])
    if narrow_first:
        compiled, eager = run(128, 32)
        assert compiled == eager
    compiled, eager = run(127, 129)
    equal[narrow_first] = compiled == eager
    print(f"code of a matrix of 128 x 32 on disk: {narrow_first}; 127 x 129 compiled {compiled}, eager {eager}")
raise SystemExit(equal != {False: True, True: False})
PYTHON
FOLDER=$folder OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/seen.py"
