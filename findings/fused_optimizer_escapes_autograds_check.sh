#!/usr/bin/env bash
# torch 2.13.0: an optimizer with fused=True changes weights without autograd noticing, so a backward that comes after the
# step uses the new weights and says nothing.
#
# Autograd saves weights in forward and raises in backward if one was modified in place meanwhile, which it knows by the
# tensor's version. Steps with foreach=True or foreach=False raise the version; the fused kernels do not. A loop that
# steps between a forward and its backward (a pipeline's schedule, a generator beside its discriminator, a retained
# graph) raises with the one and gets gradients of weights that its forward never saw with the other.
#
# Expected: RuntimeError for all three. Seen: none with fused=True, and dx = dy @ w with the w of after the step.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat >"$folder/check.py" <<'PYTHON'
import torch

print(f"torch {torch.__version__}: forward, optimizer.step(), backward")
seen = {}
for kind in (torch.optim.AdamW, torch.optim.SGD):
    for how in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        torch.manual_seed(0)
        w = torch.nn.Parameter(torch.randn(4, 4))
        x = torch.randn(4, 4, requires_grad=True)
        optimizer = kind([w], lr=1.0, **how)
        y, of_forward, version = x @ w, w.detach().clone(), w._version
        w.grad = torch.ones_like(w)
        optimizer.step()
        try:
            y.sum().backward()
        except RuntimeError:
            result = "RuntimeError"
        else:
            dy = torch.ones(4, 4)
            uses = [name for name, one in (("forward", of_forward), ("the step", w.detach())) if torch.allclose(x.grad, dy @ one.t())]
            result = f"no error, dx by the weights of {' and '.join(uses)}"
        seen[kind.__name__, *how.items()] = result
        print(f"{kind.__name__} {how}: version +{w._version - version}, {result}")
wrong = "no error, dx by the weights of the step"
raise SystemExit(any(result != (wrong if ("fused", True) in key else "RuntimeError") for key, result in seen.items()))
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/check.py"
