"""The specification of attention in float8: the arithmetic of cuDNN's kernels, in plain PyTorch, on any device.

    s = q @ k.t() * scale          float8 operands, sums in float32
    p = exp(s - max)               rounded to e4m3; the sum of p is of what was not rounded
    o = p @ v / sum                rounded to e4m3, and saved so
    dP = scale * p * (dO @ v.t() - rowsum(dO * o))      rounded to dO's format
    dv = p.t() @ dO,  dq = dP @ k,  dk = dP.t() @ q     rounded to e4m3

The kernels work on tiles, with the largest s of the columns so far in place of the row's: what they round differs, and
how much they lose by it does not. Source: ``node/sdpa_fp8_bwd.h`` of cudnn-frontend 1.23.0, which states dP so.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from f8sub.attention.problem import E4M3, Problem
from f8sub.attention.scaling import BackwardScales, ForwardScales, K, O, Q, V

if TYPE_CHECKING:
    from f8sub.formats import Float8Format

Slices = tuple[int, slice, int]


def forward(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: ForwardScales
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and the logarithms of the softmax's sums.

    Args:
        problem: the call.
        q: float8, (batch, heads, rows, width); k and v are (batch, kv_heads, cols, width).
        k: see q.
        v: see q.
        scales: of q, k, v, o and the probabilities.

    Returns:
        o, e4m3, of q's shape, by rows first in memory; and float32, (batch, heads, rows, 1).
    """
    o = _by_rows(q, E4M3)
    stats = q.new_empty((*q.shape[:3], 1), dtype=torch.float32)
    for one, heads, kv in _parts(problem):
        s = _scores(problem, q[one, heads], k[one, kv], scales.inverse)
        largest = s.amax(-1, keepdim=True)
        # No p is above 1.
        p = (s - largest).exp()
        total = p.sum(-1, keepdim=True)
        values = _rounded(p, scales.of_s[0], E4M3) @ v[one, kv].float()
        values = values * (scales.of_s[1] * scales.inverse[V]) / total
        o[one, heads] = _cast(values, scales.of_o, E4M3)
        stats[one, heads] = largest + total.log()
    return o, stats


def backward(
    problem: Problem,
    given: tuple[torch.Tensor, ...],
    inverse: torch.Tensor,
    inverse_do: torch.Tensor,
    scales: BackwardScales,
    format: "Float8Format",
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return dq, dk, dv, and the amaxes of dP, dq, dk and dv before they were rounded.

    Args:
        problem: the call.
        given: dO, q, k, v and o in float8, and the logarithms of the softmax's sums.
        inverse: inverse scales of q, k, v and o, (4,).
        inverse_do: that of dO, one element.
        scales: of what is made.
        format: of dO and dP.

    Returns:
        dq, dk and dv, e4m3, in the shapes and memory orders of q, k and v; float32, (4,).
    """
    # As many bytes as the kernels write, in the memory order of q, k and v.
    do, q, k, v, o, stats = given
    grads = tuple(torch.empty_like(x, dtype=E4M3.dtype) for x in (q, k, v))
    amaxes = stats.new_zeros(4)
    of_do = inverse_do.view(())
    for one, heads, kv in _parts(problem):
        of_q, of_k, of_v, of_o = (x.float() for x in (q[one, heads], k[one, kv], v[one, kv], o[one, heads]))
        dy = do[one, heads].float()
        # Not rounded here: dP has p as it is, and only the product with dO reads it rounded.
        p = (_scores(problem, q[one, heads], k[one, kv], inverse) - stats[one, heads]).exp()
        delta = (dy * of_o).sum(-1, keepdim=True) * (of_do * inverse[O])
        dp = (dy @ of_v.t() * (of_do * inverse[V]) - delta) * p * problem.scale
        codes = _rounded(dp, scales.gradients[0], format)
        # Heads of q that share one of k and v: their products with it are summed before they are rounded.
        dq = codes @ of_k * (scales.inverse[0] * inverse[K])
        dk = (codes.transpose(-1, -2) @ of_q).sum(0) * (scales.inverse[0] * inverse[Q])
        rounded = _rounded(p, scales.of_s[0], E4M3)
        dv = (rounded.transpose(-1, -2) @ dy).sum(0) * (scales.of_s[1] * of_do)
        amaxes = torch.maximum(amaxes, torch.stack([x.abs().amax() for x in (dp, dq, dk, dv)]))
        of_dq, of_dk, of_dv = scales.gradients[1:].unbind()
        grads[0][one, heads] = _cast(dq, of_dq, E4M3)
        grads[1][one, kv] = _cast(dk, of_dk, E4M3)
        grads[2][one, kv] = _cast(dv, of_dv, E4M3)
    return grads, amaxes


def backward_in_high_precision(
    problem: Problem, given: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv in float32, of dO, q, k, v and o in high precision and the softmax's logarithms."""
    do, q, k, v, o, stats = given
    dq, dk, dv = (torch.empty_like(x, dtype=torch.float32) for x in (q, k, v))
    one_each = q.new_ones(4, dtype=torch.float32)
    for one, heads, kv in _parts(problem):
        of_q, of_k, of_v, of_o = (x.float() for x in (q[one, heads], k[one, kv], v[one, kv], o[one, heads]))
        dy = do[one, heads].float()
        p = (_scores(problem, of_q, of_k, one_each) - stats[one, heads]).exp()
        dp = (dy @ of_v.t() - (dy * of_o).sum(-1, keepdim=True)) * p * problem.scale
        dq[one, heads] = dp @ of_k
        dk[one, kv] = (dp.transpose(-1, -2) @ of_q).sum(0)
        dv[one, kv] = (p.transpose(-1, -2) @ dy).sum(0)
    return dq, dk, dv


def _parts(problem: Problem) -> Iterator[Slices]:
    """Yield what shares a head of k and v: a matrix of scores for each head of q at a time, not for all."""
    for one in range(problem.batch):
        for kv in range(problem.kv_heads):
            yield one, slice(kv * problem.group, (kv + 1) * problem.group), kv


def _scores(problem: Problem, q: torch.Tensor, k: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return q @ k.t(), scaled and masked: float32, (group, rows, cols)."""
    s = q.float() @ k.float().t() * (problem.scale * inverse[Q] * inverse[K])
    if problem.causal:
        # From the first column on, as torch's is_causal, whatever the lengths.
        unseen = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(unseen, -torch.inf)
    return s


def _by_rows(q: torch.Tensor, format: "Float8Format") -> torch.Tensor:
    batch, heads, rows, width = q.shape
    return q.new_empty((batch, rows, heads, width), dtype=format.dtype).transpose(1, 2)


def _cast(x: torch.Tensor, scale: torch.Tensor, format: "Float8Format") -> torch.Tensor:
    """Codes of x times scale, saturated; NaN stays NaN."""
    return (x * scale).clamp(-format.max, format.max).to(format.dtype)


def _rounded(x: torch.Tensor, scale: torch.Tensor, format: "Float8Format") -> torch.Tensor:
    """``_cast``, as float32."""
    return _cast(x, scale, format).float()
