#!/usr/bin/env bash
# Triton 3.7.1 for NVIDIA GPUs: where t is a product, t - t is not 0 but the product's rounding error.
#
# Triton lets LLVM contract a product and a sum to one fused multiply-add, also where one side is the rounded product
# itself: t - t becomes fma(p, q, -t), which computes p * q exactly, and what is left is what t was rounded by. So code
# that tells NaN and infinity from numbers by x - x, as Inductor's kernels do with such a line of PyTorch, adds noise of
# 2**-24 of x; and compensated sums find another error than they made. On CPUs, and for an x that was loaded, it is 0.
#
# No GPU is needed: the kernel is compiled for one, and the PTX that it becomes is read. Expected: a subtraction, or a
# constant 0. Seen: mul, neg and fma; with enable_fp_fusion=False mul and sub. With p = q = 1 + 2**-12 the fma is 2**-24.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet triton==3.7.1 numpy

cat >"$folder/seen.py" <<'PYTHON'
import re
from fractions import Fraction

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def difference(p_ptr, q_ptr, out_ptr):
    t = tl.load(p_ptr) * tl.load(q_ptr)
    tl.store(out_ptr, t - t)


def arithmetic(fusion: bool) -> list[str]:
    pointers = dict.fromkeys(("p_ptr", "q_ptr", "out_ptr"), "*fp32")
    source = ASTSource(fn=difference, signature=pointers, constexprs={})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": fusion})
    return re.findall(r"\b(mul|sub|add|neg|fma)(?:\.rn)?\.f32", made.asm["ptx"])


fused, apart = arithmetic(True), arithmetic(False)
print("with fusion, the default:", *fused)
print("without fusion:", *apart)
p = Fraction(1) + Fraction(1, 2**12)
rounded = Fraction(float(np.float32(float(p)) * np.float32(float(p))))
error = p * p - rounded
print(f"of p = q = 1 + 2**-12 the fma is {float(error)!r}")
if (sorted(fused), apart) != (["fma", "mul", "neg"], ["mul", "sub"]) or error != Fraction(1, 2**24):
    raise SystemExit("this has changed")
PYTHON

"$folder/venv/bin/python" "$folder/seen.py"
