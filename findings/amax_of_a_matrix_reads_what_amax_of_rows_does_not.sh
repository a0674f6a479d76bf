#!/usr/bin/env bash
# torch 2.11.0, torch.compile on CUDA: x.amax() of a computed matrix is a kernel of its own, which reads the matrix
# again; x.amax(1).amax() is found by the kernel that computes it.
#
# Both are the same number. Inductor splits a reduction over everything into parts that do not match the rows of the
# kernel before it, and rows do. A library that scales a matrix by its maximum pays 0.5 to 1 bytes per byte written.
#
# Needs an NVIDIA GPU. Expected: the same kernels. Seen: the first reads the result once more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import torch
from torch._inductor.utils import run_and_get_code


def whole(gate, up):
    h = torch.nn.functional.silu(gate) * up
    return h, h.abs().amax()


def by_rows(gate, up):
    h = torch.nn.functional.silu(gate) * up
    return h, h.abs().amax(1).amax()


gate, up = (torch.randn(8192, 14336, device="cuda", dtype=torch.bfloat16) for _ in range(2))
found = {}
for function in (whole, by_rows):
    compiled = torch.compile(function, dynamic=False)
    _, (code,) = run_and_get_code(compiled, gate, up)
    launches = code.count(".run(")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(5):
        compiled(gate, up)
    begin.record()
    for _ in range(20):
        compiled(gate, up)
    end.record()
    torch.cuda.synchronize()
    found[function.__name__] = launches
    print(f"{function.__name__}: {launches} kernels, {begin.elapsed_time(end) / 20:.3f} ms")
if found != {"whole": 3, "by_rows": 2}:
    raise SystemExit(f"this has changed: {found}")
PYTHON

"$folder/venv/bin/python" "$folder/seen.py"
