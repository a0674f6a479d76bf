#!/usr/bin/env bash
# torch 2.11.0 (CUDA 13.0), cuDNN 9.19, nvidia-cudnn-frontend 1.23.0 on Hopper: dq of float8 attention is wrong at lengths
# that are no multiple of 128, and nothing says so.
#
# Forward takes any length, dk and dv are right at any, and the graph of backward is built and runs for 40 or 1000 rows as
# for 1024. So one would guess that it masks the last tile, as bf16's does. At multiples of 128 dq is as exact as dk. It is
# 2 dB worse at 1000 rows, where one tile of eight is not full, and 14 dB worse at 40: the error is a quarter of dq.
#
# Expected: dq as exact as dk at each length, as the same rounding in plain PyTorch is. Seen: at multiples of 128 alone.
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
    "$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy nvidia-cudnn-frontend==1.23.0
fi

cat >"$folder/seen.py" <<'PYTHON'
import math

import torch

import cudnn

BATCH, HEADS, WIDTH, TOP = 2, 4, 128, 448.0
E4M3, FLOATS = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
NAMES = [
    *("q", "k", "v", "o", "stats", "dO", "dQ", "dK", "dV", "scale_s", "descale_s", "scale_o", "descale_q", "descale_k"),
    *("descale_v", "descale_o", "descale_dO", "descale_dP", "scale_dP", "scale_dQ", "scale_dK", "scale_dV", "amax_s"),
    *("amax_o", "amax_dP", "amax_dQ", "amax_dK", "amax_dV"),
]
UID = {name: number for number, name in enumerate(NAMES, 1)}
handle = cudnn.create_handle()


def lies(name: str, rows: int) -> dict:
    if name in ("q", "k", "v", "o", "dO", "dQ", "dK", "dV"):
        return {"dim": (BATCH, HEADS, rows, WIDTH), "stride": (HEADS * rows * WIDTH, WIDTH, HEADS * WIDTH, 1)}
    if name == "stats":
        return {"dim": (BATCH, HEADS, rows, 1), "stride": (HEADS * rows, rows, 1, 1)}
    return {"dim": (1, 1, 1, 1), "stride": (1, 1, 1, 1)}


def run(rows: int, given: dict, outs: dict, backward: bool) -> None:
    graph = cudnn.pygraph(
        io_data_type=E4M3, intermediate_data_type=FLOATS, compute_data_type=FLOATS, handle=handle, sm_version=90
    )
    declared = {
        name: graph.tensor(
            uid=UID[name], name=name, data_type=FLOATS if x.dtype == torch.float32 else E4M3, **lies(name, rows)
        )
        for name, x in given.items()
    }
    options = {"attn_scale": WIDTH**-0.5, "use_causal_mask": True}
    if backward:
        made = graph.sdpa_fp8_backward(**declared, **options)
    else:
        made = graph.sdpa_fp8(**declared, generate_stats=True, **options)
    for tensor, (name, x) in zip(made, outs.items(), strict=True):
        tensor.set_uid(UID[name]).set_output(True).set_data_type(FLOATS if x.dtype == torch.float32 else E4M3)
        tensor.set_dim(lies(name, rows)["dim"]).set_stride(lies(name, rows)["stride"])
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    pointers = {UID[name]: x.data_ptr() for name, x in (given | outs).items()}
    graph.execute(pointers, workspace.data_ptr(), handle=handle)
    torch.cuda.synchronize()


def number(x: float) -> torch.Tensor:
    return torch.tensor([x], device="cuda")


def by_rows(rows: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.empty(BATCH, rows, HEADS, WIDTH, device="cuda", dtype=dtype).transpose(1, 2)


def cast(x: torch.Tensor, scale: float) -> torch.Tensor:
    out = by_rows(x.shape[2]) if x.shape[-1] == WIDTH else torch.empty(x.shape, device="cuda", dtype=torch.float8_e4m3fn)
    return out.copy_((x.float() * scale).clamp(-TOP, TOP).to(torch.float8_e4m3fn))


def db(found: torch.Tensor, right: torch.Tensor) -> float:
    return 10 * math.log10(right.square().sum().item() / (found.double() - right).square().sum().item())


def at(rows: int) -> dict[str, tuple[float, float]]:
    """dB of dq, dk and dv by cuDNN and by the same rounding in PyTorch, both against float64 of the same inputs."""
    torch.manual_seed(0)
    q, k, v, do = (cast(torch.randn(BATCH, HEADS, rows, WIDTH, device="cuda"), 64.0) for _ in range(4))
    scales = {"descale_q": number(1 / 64), "descale_k": number(1 / 64), "descale_v": number(1 / 64)}
    of_s = {"descale_s": number(1 / TOP), "scale_s": number(TOP)}
    o, stats = by_rows(rows), torch.empty(BATCH, HEADS, rows, 1, device="cuda")
    outs = {"o": o, "stats": stats, "amax_s": number(0.0), "amax_o": number(0.0)}
    run(rows, {"q": q, "k": k, "v": v, **scales, **of_s, "scale_o": number(60.0)}, outs, False)

    x, y, z, dy = (t.double() / 64 for t in (q, k, v, do))
    s = x @ y.transpose(-1, -2) * WIDTH**-0.5
    p = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    dp = (dy @ z.transpose(-1, -2) - (dy * (p @ z)).sum(-1, keepdim=True)) * p * WIDTH**-0.5
    right = {"dQ": dp @ y, "dK": dp.transpose(-1, -2) @ x, "dV": p.transpose(-1, -2) @ dy}
    top = {name: 0.5 * TOP / t.abs().amax().item() for name, t in {**right, "dP": dp}.items()}
    codes, chances = cast(dp, top["dP"]).double() / top["dP"], cast(p, TOP).double() / TOP
    plain = {"dQ": codes @ y, "dK": codes.transpose(-1, -2) @ x, "dV": chances.transpose(-1, -2) @ dy}
    plain = {name: cast(t, top[name]).double() / top[name] for name, t in plain.items()}

    grads = {name: by_rows(rows) for name in right}
    outs = {**grads, **{f"amax_{name}": number(0.0) for name in ("dQ", "dK", "dV", "dP")}}
    given = {"q": q, "k": k, "v": v, "o": o, "dO": do, "stats": stats, **scales, **of_s}
    given |= {"descale_o": number(1 / 60), "descale_dO": number(1 / 64), "descale_dP": number(1 / top["dP"])}
    run(rows, given | {f"scale_{name}": number(value) for name, value in top.items()}, outs, True)
    return {name: (db(t.double() / top[name], right[name]), db(plain[name], right[name])) for name, t in grads.items()}


print(f"torch {torch.__version__}, cuDNN {cudnn.backend_version_string()}, frontend {cudnn.__version__}")
worse = {}
for rows in (1024, 1000, 128, 40):
    found = at(rows)
    worse[rows] = found["dK"][0] - found["dQ"][0]
    shown = ", ".join(f"{name} {theirs:.1f} ({plain:.1f})" for name, (theirs, plain) in found.items())
    print(f"{rows} rows, dB by cuDNN (and by the same rounding in PyTorch): {shown}")
    even = abs(found["dQ"][1] - found["dK"][1]) < 0.3
    if not (even and found["dK"][1] - found["dK"][0] < 2.5 and abs(found["dV"][1] - found["dV"][0]) < 0.5):
        raise SystemExit("dK, dV or the rounding in PyTorch is not as seen")
raise SystemExit(not (max(worse[1024], worse[128]) < 0.5 and worse[1000] > 1 and worse[40] > 6))
PYTHON
OMP_NUM_THREADS=1 "$PYTHON" "$folder/seen.py"
