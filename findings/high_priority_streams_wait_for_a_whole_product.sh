#!/usr/bin/env bash
# torch 2.11.0 (CUDA 13.0) on an H200: a kernel on a high-priority stream waits until the product that runs has ended.
#
# FSDP2 launches all-gathers on a stream of high priority, so that one would guess they start at once and share the GPU
# with a product. A product's kernel is persistent: its blocks hold all SMs until it ends, and priority decides which
# blocks are placed next, not which leave. A copy of 1 MiB that takes some microseconds ends 0.7 ms later, the rest of
# one float8 product of 8192 cubed, 1.4 ms with bfloat16, and its priority changes nothing. NCCL's kernels wait so, too.
#
# Expected: less than a tenth of a product. Seen: more than half of one, with high priority as without.
# Needs an NVIDIA GPU of compute capability 9.0, and skips itself without one. PYTHON names an interpreter that has the
# packages, where there is no package index.
set -euo pipefail
if ! nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -q '^9\.0'; then
    echo "skipped: no GPU of compute capability 9.0"
    exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON=$folder/venv/bin/python
    "$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy
fi

cat >"$folder/seen.py" <<'PYTHON'
import statistics

import torch

SIZE = 8192
x, w = (torch.randn(SIZE, SIZE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
xb, wb, scale = x.bfloat16(), w.bfloat16(), torch.ones((), device="cuda")
source, target = (torch.empty(2**20, device="cuda", dtype=torch.uint8) for _ in range(2))
PRODUCTS = {
    "float8": lambda: torch._scaled_mm(x, w.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True),
    "bfloat16": lambda: xb @ wb.t(),
}


def waited(kind: str, priority: int) -> tuple[float, float]:
    """Milliseconds from when a small kernel may run until it has run, behind products; and those of one product."""
    stream, found = torch.cuda.Stream(priority=priority), []
    for _ in range(8):
        torch.cuda.synchronize()
        begin, ready, last, end = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        for _ in range(3):
            PRODUCTS[kind]()
        begin.record()
        for _ in range(4):
            PRODUCTS[kind]()
        ready.record()
        for _ in range(20):
            PRODUCTS[kind]()
        last.record()
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            torch.add(source, 1, out=target)
            end.record()
        torch.cuda.synchronize()
        found.append((ready.elapsed_time(end), begin.elapsed_time(ready) / 4))
    return tuple(statistics.median(times) for times in zip(*found[2:], strict=True))


print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
as_seen = True
for kind in PRODUCTS:
    for priority in (0, -1):
        delay, product = waited(kind, priority)
        print(f"{kind}, priority {priority}: a small kernel ends after {delay:.3f} ms, a product takes {product:.3f} ms")
        as_seen &= delay > 0.5 * product
raise SystemExit(not as_seen)
PYTHON
"$PYTHON" "$folder/seen.py"
