"""Attention in float8 as operators that autograd and ``torch.compile`` know.

``f8sub::attention`` casts q, k and v, calls the kernels, and returns o in high precision, and what backward reads, all
of it 1 byte per element. Backward is ``f8sub::attention_backward``, which writes to the histories and nothing else.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from f8sub.attention import cudnn, reference
from f8sub.attention.casts import Remembered, back, cast_backward, cast_forward, finish_backward
from f8sub.attention.problem import E4M3, GRADIENT_FORMATS, HIGH_PRECISION, Problem, packed
from f8sub.attention.scaling import O, backward_scales, with_measured
from f8sub.kernels.ops import operator
from f8sub.torch_compat import dispatch_stack_size

BACKENDS = {"cudnn": cudnn, "reference": reference}

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Seven = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]

_measured = WeakTensorKeyDictionary()
"""Layers' marks for which backward ran once in this process: their histories are no longer empty."""


def smoothed(k: torch.Tensor) -> torch.Tensor:
    """Return k (batch, heads, rows, width) less each head's mean over the rows, which softmax does not see.

    It adds the same to all scores of a row of q. Channels of k that are large for all tokens would take most of e4m3's
    range, and this leaves what differs (arXiv 2410.02367, 4.2). Gradients are those of k: the columns of dP sum up to
    zero. docs/attention.md says what it gains.
    """
    return k - k.mean(2, keepdim=True, dtype=torch.float32).to(k.dtype)


def _attention(  # noqa: PLR0913  (an operator has no structures)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    history: torch.Tensor,
    saturated: torch.Tensor,
    mark: torch.Tensor,
    causal: bool,
    scale: float,
    backend: str,
    backward: str,
) -> Seven:
    """Return o in q's dtype; q, k, v and o in float8, as bytes; their inverse scales; the softmax's logarithms."""
    # Packed first: the fake promises the strides of packed tensors, which the difference then has, too.
    q, k, v = packed(q), smoothed(packed(k)), packed(v)
    problem = Problem.of(q, k, v, causal, scale)
    qkv, scales = cast_forward(q, k, v)
    o8, stats = BACKENDS[backend].forward(problem, *qkv, scales)
    (o,) = back((o8,), scales.inverse[O:], q.dtype)
    # As bytes, which autograd takes for numbers that have no gradient.
    q8, k8, v8, o8 = (x.view(torch.uint8) for x in (*qkv, o8))
    return o, q8, k8, v8, o8, scales.inverse, stats


def _fake_attention(  # noqa: PLR0913
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    history: torch.Tensor,
    saturated: torch.Tensor,
    mark: torch.Tensor,
    causal: bool,
    scale: float,
    backend: str,
    backward: str,
) -> Seven:
    q8, k8, v8 = (torch.empty_like(packed(x), dtype=torch.uint8) for x in (q, k, v))
    batch, heads, rows, width = q.shape
    o = q.new_empty((batch, rows, heads, width)).transpose(1, 2)
    inverse = q.new_empty(4, dtype=torch.float32)
    stats = q.new_empty((batch, heads, rows, 1), dtype=torch.float32)
    return o, q8, k8, v8, torch.empty_like(o, dtype=torch.uint8), inverse, stats


def _attention_backward(  # noqa: PLR0913
    do: torch.Tensor,
    saved: list[torch.Tensor],
    history: torch.Tensor,
    saturated: torch.Tensor,
    mark: torch.Tensor,
    causal: bool,
    scale: float,
    backend: str,
    backward: str,
) -> Three:
    """Return dq, dk and dv in the dtype of dO."""
    *bytes_of, inverse, stats = saved
    q, k, v, o = (x.view(E4M3.dtype) for x in bytes_of)
    problem = Problem.of(q, k, v, causal, scale)
    # By rows first, as o is.
    do = do.transpose(1, 2).contiguous().transpose(1, 2)
    kernels = BACKENDS[backend]
    if backward == HIGH_PRECISION:
        # Of what forward multiplied: the gradients are those of the rounded q, k and v.
        values = back((q, k, v, o), inverse, do.dtype)
        made = kernels.backward_in_high_precision(problem, (do, *values, stats))
        dq, dk, dv = (x.to(do.dtype) for x in made)
        return dq, dk, dv
    # The current amax of dO, as of q, k and v in forward.
    format = GRADIENT_FORMATS[backward]
    do8, of_do, scales = cast_backward(problem, do, inverse, history, format)
    given = do8, q, k, v, o, stats
    if mark not in _measured:
        # Bounds saturate nothing, so this pass measures; a history that was loaded decides all the same.
        _measured[mark] = True
        _, amaxes = kernels.backward(problem, given, inverse, of_do, scales, format)
        known = with_measured(history, amaxes)
        scales = backward_scales(problem, inverse, of_do, known, format.max)
    grads, amaxes = kernels.backward(problem, given, inverse, of_do, scales, format)
    return finish_backward(grads, scales, amaxes, Remembered(history, saturated), format.max, do.dtype)


def _fake_backward(  # noqa: PLR0913
    do: torch.Tensor,
    saved: list[torch.Tensor],
    history: torch.Tensor,
    saturated: torch.Tensor,
    mark: torch.Tensor,
    causal: bool,
    scale: float,
    backend: str,
    backward: str,
) -> Three:
    dq, dk, dv = (torch.empty_like(x, dtype=do.dtype) for x in saved[:3])
    return dq, dk, dv


attention = operator(_attention, "attention", _fake_attention)
attention_backward = operator(
    _attention_backward, "attention_backward", _fake_backward, mutates=("history", "saturated")
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Seven) -> None:
    *_, history, saturated, mark, causal, scale, backend, backward = inputs
    # Else autograd makes zeros for the six results that have no gradient.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    # Not saved: a later backward writes to them, which autograd would take for an error.
    ctx.state = history, saturated, mark
    ctx.options = causal, scale, backend, backward


def _differentiate(ctx: Any, do: torch.Tensor | None, *of_saved: None) -> tuple[Any, ...]:
    # Nothing that trains reads o.
    if do is None:
        return (None,) * 10
    made = attention_backward(do, list(ctx.saved_tensors), *ctx.state, *ctx.options)
    return (*made, *(None,) * 7)


torch.library.register_autograd("f8sub::attention", _differentiate, setup_context=_save)


class _Attend(torch.autograd.Function):
    """``attention`` for eager code, which is given o alone."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        o, *saved = _called(attention, _attention)(*inputs)
        ctx.save_for_backward(*saved)
        # Not saved: a later backward writes to them, which autograd would take for an error.
        ctx.state, ctx.options = inputs[3:6], inputs[6:]
        return o  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> tuple[Any, ...]:
        backward = _called(attention_backward, _attention_backward)
        return (*backward(do, list(ctx.saved_tensors), *ctx.state, *ctx.options), *(None,) * 7)


def _called(operator: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is to be called: the operator where a mode looks on, as those of checkpointing policies do."""
    return operator if dispatch_stack_size() else function


def attend(*inputs: Any) -> torch.Tensor:
    """Return o of ``attention``, whose arguments these are.

    What torch makes of an operator's seven results for autograd keeps the host longer than a function of one result
    does, so eager code has such a function. Where a policy of checkpointing looks on, it calls the operator.
    """
    if torch.compiler.is_compiling():
        return attention(*inputs)[0]  # type: ignore[no-any-return]
    return _Attend.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]
