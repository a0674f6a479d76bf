#!/usr/bin/env bash
# torch 2.11.0, CUDA: torch._chunk_cat, by which FSDP2 copies gradients before it reduces them, keeps the host busy for
# as long as the gradients are large.
#
# A launch is asynchronous, so a copy should cost the host the same few microseconds whatever its size. This operator
# fills a table in pinned memory with an entry for every few kilobytes of every gradient, and sends it to the GPU. The
# table of a Llama 3 8B's block takes the host milliseconds, half as long as the block's backward takes the GPU in
# float8. torch._foreach_copy_ of the same tensors does not grow.
#
# Needs an NVIDIA GPU with 8 GB. Expected: a constant. Seen: host time grows with the bytes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import statistics
import time

import torch


def host_ms(run):
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[5:])


found = []
for rows in (256, 4096, 32768):
    gradients = [torch.randn(rows, 4096, device="cuda").bfloat16() for _ in range(2)]
    flat = torch.empty(2, sum(g.numel() for g in gradients) // 2, device="cuda")
    halves = [torch.empty_like(g, dtype=torch.float32) for g in gradients]
    table = host_ms(lambda: torch._chunk_cat(gradients, 0, 2, out=flat))
    plain = host_ms(lambda: torch._foreach_copy_(halves, gradients))
    found.append((table, plain))
    print(f"{2 * rows * 4096 / 1e6:6.1f}M elements: _chunk_cat {table:.3f} ms of host time, _foreach_copy_ {plain:.3f} ms")
small, large = found[0], found[-1]
if not (large[0] > 20 * small[0] and large[0] > 10 * large[1]):
    raise SystemExit("this has changed")
PYTHON

"$folder/venv/bin/python" "$folder/seen.py"
