"""checkpoint_policy: which results a checkpointed function saves, and which it makes again in backward.

A float8 product is ``aten.mm`` to a policy, so lists made for bf16 mean the same here. What a policy
decides is about results of products: little of the elementwise work between them is worth its memory, and
``torch.compile`` repeats it inside of other kernels. In compiled code every policy saves the amax that makes a scale.

A selective checkpointing policy is a dispatch mode with a list of operators to save. All lists have ``aten.mm``; few
have what runs a float8 GEMM, ``_scaled_mm`` or an operator of a backend. So where a mode looks on, two Float8Tensors
are multiplied by ``aten.mm``, whose ``__torch_dispatch__`` runs below the mode.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from f8sub.attention.ops import attention
from f8sub.errors import unknown
from f8sub.formats import Float8Format, Operand
from f8sub.kernels.gemm.select import gemm_nt
from f8sub.kernels.graph_ops import enter_graph_functions, in_graph
from f8sub.kernels.grouped.ops import plain_rows_as_one_node, rows_as_one_node
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import all_to_all_node, autocast_dtype, reduce_scatter_node

aten = torch.ops.aten

KEEP = ("bf16", "gemms")

PRODUCTS = {
    getattr(aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "_scaled_grouped_mm")
    if hasattr(aten, name)
} | {rows_as_one_node, plain_rows_as_one_node}

ATTENTION = {
    getattr(aten, f"_scaled_dot_product_{kind}").default
    for kind in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
        "fused_attention_overrideable",
    )
    if hasattr(aten, f"_scaled_dot_product_{kind}")
} | {torch.ops.higher_order.flex_attention, attention}

COMMUNICATION = {reduce_scatter_node, all_to_all_node}

ROUTING = {aten.topk.default}
"""What need not choose the same experts again where scores are equal, and the tokens sent are those of the choice."""


def checkpoint_policy(keep: str = "bf16", *, save: Iterable[Any] = ()) -> Callable[[], Any]:
    """A ``context_fn`` for ``torch.utils.checkpoint``, in eager and in compiled code.

    Losses and gradients are bitwise those without checkpointing. Bytes below are of one token and one Llama layer of
    4096/14336 features with 8 heads for keys and values, in bf16, the layer's input included; without checkpointing
    bf16 saves 148 kB, and checkpointing that saves nothing else 8 kB.

    Args:
        keep: "bf16" saves what the usual policy for bf16 does: attention, and of products of one shape every second
            (54 kB; k or v, o and up are multiplied again). "gemms" saves every product that backward reads (92 kB;
            nothing is multiplied again).
        save: other operators whose results are saved, ``torch.ops.aten.NAME.default``.

    Returns:
        What ``checkpoint(function, *args, use_reentrant=False, context_fn=...)`` and
        ``checkpoint_wrapper(module, context_fn=...)`` take.

    Raises:
        Float8ConfigError: no such ``keep``.
    """
    if keep not in KEEP:
        raise unknown("keep", keep, KEEP)
    every_product, saved = keep == "gemms", ATTENTION | COMMUNICATION | ROUTING | set(save)

    def contexts() -> Any:
        # One for each checkpointed call: its forward and the repetition count apart, both from the beginning.
        seen: Counter[Any] = Counter()

        def decide(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            is_saved = func in saved
            if func in PRODUCTS and not is_saved:
                # As text, for a size that is symbolic while a graph is traced cannot be hashed.
                key = ctx.is_recompute, func, *(str(a.shape) for a in args if isinstance(a, torch.Tensor))
                seen[key] += 1
                is_saved = every_product or seen[key] % 2 == 1
            # PREFER, because compiled code may save what is cheaper to keep than to repeat.
            return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)

    return contexts


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


def mm_in_graph(
    backend: str, a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    """``as_mm`` in a function that dynamo traces."""
    enter_graph_functions()
    formats = a.format.name, b.format.name
    return _in_graph(backend, out_dtype, fast_accum, formats, len(a.tensors), *a.tensors, *b.tensors)


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
    return as_mm(backend, a, b, out_dtype, fast_accum, traced=True)


def as_mm(
    backend: str, a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool, *, traced: bool = False
) -> torch.Tensor:
    """``gemm_nt`` that dispatch modes see as ``aten.mm`` of (M, K) and (K, N); ``traced`` for a compiled graph."""
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
