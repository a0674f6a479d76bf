#!/usr/bin/env bash
# torch 2.13.0: a compiled autograd.Function whose forward takes *weights drops its first argument under no_grad, silently.
#
# Where no gradient is asked for, dynamo calls forward itself. Whether forward takes a ctx it tells by counting: if there
# are as many arguments besides ctx as forward has parameters, ctx is left out. *weights is one parameter, however many
# are given. So forward(ctx, x, *weights), three parameters, is right with one, three or more weights. With two of them
# x becomes ctx, the first weight becomes x, and the second is all that is left of weights.
#
# Expected: the product that eager code has. Seen: with two weights the product of the weights, without x, and no error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import torch


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *weights):
        for weight in weights:
            x = x * weight
        return x

    @staticmethod
    def backward(ctx, dy):
        raise NotImplementedError


def product(*arguments):
    return Product.apply(*arguments)


right = {}
for count in range(5):
    x = torch.arange(3.0)
    weights = [torch.full((3,), 2.0 + number, requires_grad=True) for number in range(count)]
    torch._dynamo.reset()
    with torch.no_grad():
        eager = product(x, *weights)
        compiled = torch.compile(product, backend="eager", fullgraph=True)(x, *weights)
    right[count] = torch.equal(eager, compiled)
    print(torch.__version__, count, "weights: eager", eager.tolist(), "compiled", compiled.tolist())
    if count == 2:
        right[count] |= compiled.tolist() != [6.0, 6.0, 6.0]
if right != {0: True, 1: True, 2: False, 3: True, 4: True}:
    raise SystemExit(f"changed: {right}")
PYTHON
"$folder/venv/bin/python" "$folder/seen.py"
