"""A float8 GEMM that dispatch modes see as ``aten.mm``.

A selective checkpointing policy is a dispatch mode with a list of operators to save. All lists have ``aten.mm``; few
have what runs a float8 GEMM, ``_scaled_mm`` or an operator of a backend. So where a mode looks on, two Float8Tensors
are multiplied by ``aten.mm``, whose ``__torch_dispatch__`` runs below the mode.
"""

from typing import Any

import torch

from f8sub.formats import Float8Format, Operand
from f8sub.kernels.gemm.select import gemm_nt
from f8sub.kernels.graph_ops import enter_graph_functions, in_graph
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import autocast_dtype, dispatch_stack_size


class _Factor(Float8Tensor):
    """One side of a product, which knows how it is multiplied; it lives for one call."""

    run: Any

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.mm.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        a, b = args
        return a.run(a.rowwise, b.columnwise)


def multiply(
    backend: str, a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool = False
) -> torch.Tensor:
    """``gemm_nt`` that a dispatch mode, if there is one, sees as ``aten.mm`` of (M, K) and (K, N)."""
    if torch.compiler.is_dynamo_compiling():
        enter_graph_functions()
        formats = a.format.name, b.format.name
        return _in_graph(backend, out_dtype, fast_accum, formats, len(a.tensors), *a.tensors, *b.tensors)
    if dispatch_stack_size() > 0:  # a checkpointing policy, a FLOP counter, an export
        return _as_mm(backend, a, b, out_dtype, fast_accum, traced=False)
    return gemm_nt(backend, a, b, out_dtype, fast_accum)


@in_graph
def _in_graph(
    backend: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
    formats: tuple[str, str],
    split: int,
    *tensors: torch.Tensor,
) -> torch.Tensor:
    """One node to dynamo, which cannot make a Float8Tensor in its graph; AOT autograd traces what is in it."""
    a_format, b_format = map(Float8Format.parse, formats)
    a, b = Operand.of(a_format, *tensors[:split]), Operand.of(b_format, *tensors[split:])
    return _as_mm(backend, a, b, out_dtype, fast_accum, traced=True)


def _as_mm(
    backend: str, a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool, *, traced: bool
) -> torch.Tensor:
    # Asked here, where dynamo does not look: that of torch 2.11 takes all code that it compiles for exported.
    if torch.compiler.is_exporting():  # a mode of torch.export dispatches below the tensors' own
        return gemm_nt(backend, a, b, out_dtype, fast_accum, traced=True)
    left, right = _Factor(a, None, out_dtype), _Factor(None, b, out_dtype)
    left.run = lambda a, b: gemm_nt(backend, a, b, out_dtype, fast_accum, traced)
    device = a.data.device.type
    if autocast_dtype(device) is None:
        return torch.mm(left, right)
    # Autocast would dequantize both.
    with torch.autocast(device, enabled=False):
        return torch.mm(left, right)
