#!/usr/bin/env bash
# torch 2.13.0: compiled code rounds a gradient to the parameter's dtype before grad_dtype keeps it in float32.
#
# Parameter.grad_dtype says in which dtype autograd leaves a gradient. A bf16 weight with grad_dtype = float32 gets the
# float32 gradient that an autograd.Function returns, unrounded, in eager code. AOTAutograd traces the backward with
# weights of its own, which have no grad_dtype, so autograd's check casts the gradient to bf16 in the graph. What comes
# out is cast to float32 then. The gradient's dtype is what was asked for; 16 of its bits are gone. torch 2.11 and 2.15
# do the same.
#
# Expected: the same gradient, eager and compiled. Seen: compiled gradients hold values of bf16, and nothing says so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import torch


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.t().float() @ x.float()


def product(x, weight):
    return Product.apply(x, weight)


torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randn(8, 16, dtype=torch.bfloat16))
weight.grad_dtype = torch.float32
x, dy = (torch.randn(4, width, dtype=torch.bfloat16) for width in (16, 8))
seen = {}
for how in ("eager", "compiled"):
    call = product if how == "eager" else torch.compile(product, backend="aot_eager", fullgraph=True)
    weight.grad = None
    call(x, weight).backward(dy)
    of_bf16 = torch.equal(weight.grad, weight.grad.bfloat16().float())
    seen[how] = weight.grad.dtype, of_bf16
    print(torch.__version__, how, weight.grad.dtype, "every value is one of bf16:", of_bf16)
if seen != {"eager": (torch.float32, False), "compiled": (torch.float32, True)}:
    raise SystemExit(f"changed: {seen}")
PYTHON
"$folder/venv/bin/python" "$folder/seen.py"
