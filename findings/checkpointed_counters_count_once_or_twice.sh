#!/usr/bin/env bash
# torch 2.13.0: whether a checkpointed forward counts twice depends on what comes after the counter in the same region.
#
# Activation checkpointing runs forward again in backward, so one would leave counters alone or halve them. Without
# reentrant autograd it stops the second time at the last tensor that backward needs, and what follows does not run. A
# router that counts its tokens after its softmax counts them once where nothing after it saves a tensor, and twice where a
# layer follows in the same region. So counts (for load balance, or hooks of a profiler or monitor) change by a factor of 2
# with where a user draws the region, and of a module's forward hooks some run twice and the last ones once.
#
# Expected: one factor. Seen: 16 tokens counted as 16 with the router alone, as 32 with a layer behind it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("tokens", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.layer(x).softmax(-1)
        self.tokens += torch.bincount(shares.argmax(-1), minlength=4)
        return shares


def counted(*behind: nn.Module) -> tuple[int, list[int]]:
    region = nn.Sequential(Router(), *behind)
    calls = [0] * len(region)

    def hook(index: int) -> None:
        def count(module, args, output) -> None:
            calls[index] += 1

        region[index].register_forward_hook(count)

    for index in range(len(region)):
        hook(index)
    checkpoint(region, torch.randn(16, 8), use_reentrant=False).square().sum().backward()
    return int(region[0].tokens.sum()), calls


alone, followed = counted(), counted(nn.Linear(4, 8))
print(f"torch {torch.__version__}, checkpoint(use_reentrant=False), 16 tokens")
print(f"router alone: {alone[0]} counted, its hook called {alone[1]} times")
print(f"router and a linear layer: {followed[0]} counted, their hooks called {followed[1]} times")
raise SystemExit((alone, followed) != ((16, [1]), (32, [2, 1])))
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/seen.py"
