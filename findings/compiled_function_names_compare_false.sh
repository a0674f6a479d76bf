#!/usr/bin/env bash
# torch 2.13.0, torch.compile: comparing a function's __qualname__ with a string is False, also where they are equal.
#
# In code that is compiled, `function.__qualname__ == "scale"` is False, while `function.__qualname__` returned from the
# same code is "scale", and the comparison of __name__ is True. There is no graph break, no warning and no error, so
# code that chooses a fast path by a function's name takes the slow path only when it is compiled. torch 2.15 is right.
#
# Expected: True, as in eager code. Seen: False.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import torch


def scale(self, x):
    return 2 * x


class Layer(torch.nn.Module):
    apply_scale = scale

    def forward(self, x):
        function = type(self).apply_scale
        return x, function.__qualname__, function.__qualname__ == "scale", function.__name__ == "scale"


layer = Layer()
_, *eager = layer(torch.ones(2))
_, *compiled = torch.compile(layer, backend="eager", fullgraph=True)(torch.ones(2))
print(f"eager: {eager}, compiled: {compiled}")
if eager != ["scale", True, True] or compiled != ["scale", False, True]:
    raise SystemExit(f"this has changed: {eager}, {compiled}")
PYTHON

"$folder/venv/bin/python" "$folder/seen.py"
