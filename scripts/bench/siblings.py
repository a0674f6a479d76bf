"""Times layers that share an input, as products of their own and as one: q, k, v and gate, up of a Llama 3 8B.

Plain torch and its compiler; needs a GPU with float8. The operands are cast already: e4m3 x and w, e5m2 dy, bf16
results, fast accumulation in fprop alone. Every variant is a CUDA graph over three sets of operands; the graphs of a
case are replayed in turns. It also compares torch's row-wise kernel with cuBLASLt's tensorwise one, product by product.

    python scripts/bench/siblings.py --json siblings.json

fprop: ``apart`` (tensorwise), ``apart by row`` (the row-wise kernel, scales repeated before), ``... filled`` (with the
kernels that repeat them), ``one`` (codes side by side), ``one with cat`` (codes copied side by side before).
dgrad, with backward of the RMSNorm before the layers, which the compiler fuses with the sum of the dx: ``apart``,
``apart, summed`` (the sum by torch's additions), ``one``. ``alone`` are the GEMMs without sum and norm.
wgrad: ``apart``, ``one`` (the row-wise kernel, so that each layer keeps its scale).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from scripts.bench import timing
from scripts.bench.timing import SETS, Run

DIM = 4096
GROUPS = {"q, k, v": (4096, 1024, 1024), "gate, up": (14336, 14336)}
PRODUCTS = {  # (N, K) of the layers of one block
    "q": (4096, 4096), "k": (1024, 4096), "gate": (14336, 4096), "down": (4096, 14336),
}  # fmt: skip
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def cast(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and the inverse scale, () float32."""
    amax, top = x.abs().amax().float(), torch.finfo(dtype).max
    return (x.float() * (top / amax)).clamp(-top, top).to(dtype), amax / top


def beside(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat([part.view(torch.uint8) for part in parts], dim).view(parts[0].dtype)


def tensorwise(
    a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, fast: bool
) -> torch.Tensor:
    """The product of a (M, K) and b (N, K), one scale each."""
    return torch._scaled_mm(a, b.t(), sa, sb, out_dtype=torch.bfloat16, use_fast_accum=fast)


def rowwise(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, fast: bool) -> torch.Tensor:
    """The same by the row-wise kernel; scales of one element are repeated here."""
    sa = sa.expand(len(a), 1).contiguous() if sa.numel() == 1 else sa
    sb = sb.expand(1, len(b)).contiguous() if sb.numel() == 1 else sb
    return torch._scaled_mm(a, b.t(), sa, sb, out_dtype=torch.bfloat16, use_fast_accum=fast)


class Group:
    """Operands of layers that share an input, codes and scales by layer and side by side."""

    def __init__(self, sizes: tuple[int, ...], tokens: int, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)

        def drawn(*shape: int, std: float) -> torch.Tensor:
            values = torch.randn(*shape, device="cuda", generator=generator, dtype=torch.bfloat16)
            return values * std

        self.hidden = drawn(tokens, DIM, std=1.0)
        self.gain = torch.ones(DIM, device="cuda")
        self.x, self.sx = cast(self.hidden, E4M3)
        self.x_col = self.x.t().contiguous()
        weights = [cast(drawn(n, DIM, std=0.02 + 0.01 * i), E4M3) for i, n in enumerate(sizes)]
        grads = [cast(drawn(tokens, n, std=1e-3 / (1 + i)), E5M2) for i, n in enumerate(sizes)]
        self.w, self.sw = map(list, zip(*weights, strict=True))
        self.dy, self.sdy = map(list, zip(*grads, strict=True))
        self.w_col = [w.t().contiguous() for w in self.w]
        self.dy_col = [dy.t().contiguous() for dy in self.dy]
        self.all_w, self.all_w_col = beside(self.w, 0), beside(self.w_col, 1)
        self.all_dy, self.all_dy_col = beside(self.dy, 1), beside(self.dy_col, 0)
        self.rows_x, self.cols_x = (self.sx.expand(n).contiguous() for n in (tokens, DIM))
        self.rows_x, self.cols_x = self.rows_x[:, None], self.cols_x[None]
        self.cols_w = [s.expand(1, n).contiguous() for s, n in zip(self.sw, sizes, strict=True)]
        self.all_cols_w = torch.cat(self.cols_w, 1)
        rows = [s.expand(n, 1) for s, n in zip(self.sdy, sizes, strict=True)]
        self.all_rows_dy = torch.cat(rows).contiguous()


def norm_backward(hidden: torch.Tensor, gain: torch.Tensor, grads: list[torch.Tensor]) -> Any:
    """Backward of RMSNorm, whose result the layers read, with the sum of their dx and the residual's addition."""
    dy = grads[0]
    for each in grads[1:]:
        dy = dy + each
    x, dy = hidden.float(), dy.float()
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    normed = x * inverse
    scaled = dy * gain
    dx = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return (hidden + dx.to(hidden.dtype)), (dy * normed).sum(0)


def of_group(name: str, group: Group) -> dict[str, dict[str, Run]]:
    """Case -> variant -> function of a ``Group``."""
    norm = torch.compile(norm_backward, dynamic=False)
    summed = torch.compile(norm_backward, dynamic=False)

    def dgrads(g: Group) -> list[torch.Tensor]:
        return [tensorwise(*each, False) for each in zip(g.dy, g.w_col, g.sdy, g.sw, strict=True)]

    def dgrad(g: Group) -> torch.Tensor:
        return tensorwise(g.all_dy, g.all_w_col, g.sdy[0], g.sw[0], False)

    def added(g: Group) -> torch.Tensor:
        total, *others = dgrads(g)
        for other in others:
            total = total + other
        return total

    return {
        "fprop": {
            "apart": lambda g: [tensorwise(g.x, w, g.sx, s, True) for w, s in zip(g.w, g.sw, strict=True)],
            "apart by row": lambda g: [
                rowwise(g.x, w, g.rows_x, s, True) for w, s in zip(g.w, g.cols_w, strict=True)
            ],
            "apart by row, filled": lambda g: [
                rowwise(g.x, w, g.sx, s, True) for w, s in zip(g.w, g.sw, strict=True)
            ],
            "one": lambda g: rowwise(g.x, g.all_w, g.rows_x, g.all_cols_w, True),
            "one with cat": lambda g: rowwise(g.x, beside(g.w, 0), g.rows_x, g.all_cols_w, True),
        },
        "dgrad": {
            "alone, apart": dgrads,
            "alone, one": dgrad,
            "apart": lambda g: norm(g.hidden, g.gain, dgrads(g)),
            "apart, summed": lambda g: summed(g.hidden, g.gain, [added(g)]),
            "one": lambda g: summed(g.hidden, g.gain, [dgrad(g)]),
        },
        "wgrad": {
            "apart": lambda g: [
                tensorwise(dy, g.x_col, s, g.sx, False) for dy, s in zip(g.dy_col, g.sdy, strict=True)
            ],
            "one": lambda g: rowwise(g.all_dy_col, g.x_col, g.all_rows_dy, g.cols_x, False),
        },
    }


def medians(runs: dict[str, Run], sets: list[Any], rounds: int) -> dict[str, float]:
    """Milliseconds for one set, by variant."""
    pool = timing.graph_pool(torch.device("cuda"))
    timers = {name: timing.by_graph(run, sets, pool) for name, run in runs.items()}
    timing.in_turns(timers, 2)  # clocks rise in the first rounds
    times = timing.in_turns(timers, rounds)
    return {name: round(statistics.median(each), 4) for name, each in times.items()}


def groups(rounds: int, tokens: int) -> list[dict[str, Any]]:
    found = []
    for name, sizes in GROUPS.items():
        sets = [Group(sizes, tokens, seed) for seed in range(SETS)]
        for case, runs in of_group(name, sets[0]).items():
            found.append({"layers": name, "case": case, "ms": medians(runs, sets, rounds)})
            print(json.dumps(found[-1]), flush=True)
    return found


def kernels(rounds: int, tokens: int) -> list[dict[str, Any]]:
    """The row-wise kernel beside the tensorwise one, for each product of each layer: (M, K, N) and both rates."""
    found = []
    for layer, (n, k) in PRODUCTS.items():
        for gemm, shape in {
            "fprop": (tokens, k, n), "dgrad": (tokens, n, k), "wgrad": (n, tokens, k),
        }.items():  # fmt: skip
            fast = gemm == "fprop"
            rows, depth, cols = shape
            sets = []
            for seed in range(SETS):
                generator = torch.Generator("cuda").manual_seed(seed)
                a = torch.randn(rows, depth, device="cuda", generator=generator)
                b = torch.randn(cols, depth, device="cuda", generator=generator)
                (a, sa), (b, sb) = cast(a, E4M3 if fast else E5M2), cast(b, E4M3)
                of_rows = sa.expand(rows, 1).contiguous(), sb.expand(1, cols).contiguous()
                sets.append((a, b, sa, sb, *of_rows))
            runs = {
                "tensorwise": lambda s, fast=fast: tensorwise(*s[:4], fast),
                "by row": lambda s, fast=fast: rowwise(*s[:2], *s[4:], fast),
                "by row, filled": lambda s, fast=fast: rowwise(*s[:4], fast),
            }
            one, other = runs["tensorwise"](sets[0]), runs["by row"](sets[0])
            codes, others = sets[0][0][:256].double(), sets[0][1].double()
            right = codes @ others.t() * float(sets[0][2] * sets[0][3])
            exact = [y[:256].double() - right for y in (one, other)]
            tera = 2 * rows * depth * cols / 1e9
            rates = {name: round(tera / ms) for name, ms in medians(runs, sets, rounds).items()}
            found.append({
                "layer": layer, "gemm": gemm, "shape": shape, "fast": fast, "tflops": rates,
                "equal_share": round((one == other).float().mean().item(), 4),
                "rms_error": [round(e.square().mean().sqrt().item(), 5) for e in exact],
            })  # fmt: skip
            print(json.dumps(found[-1]), flush=True)
            del sets, one, other, exact, codes, others, right
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    began = time.perf_counter()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    found = {
        "device": torch.cuda.get_device_name(),
        "kernels": kernels(given.rounds, given.tokens),
        "groups": groups(given.rounds, given.tokens),
    }
    print(f"{time.perf_counter() - began:.0f} s")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
