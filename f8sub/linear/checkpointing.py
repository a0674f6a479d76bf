"""checkpoint_policy: which results a checkpointed function saves, and which it makes again in backward.

A float8 product is ``aten.mm`` to a policy, see ``product``, so lists made for bf16 mean the same here.
What a policy decides is about results of products: little of the elementwise work between them is worth its memory, and
``torch.compile`` repeats it inside of other kernels. In compiled code every policy saves the amax that makes a scale.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from f8sub.errors import unknown
from f8sub.kernels.grouped.ops import plain_rows_as_one_node, rows_as_one_node
from f8sub.torch_compat import reduce_scatter_node

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
} | {torch.ops.higher_order.flex_attention}

COMMUNICATION = {reduce_scatter_node}


def checkpoint_policy(keep: str = "bf16", *, save: Iterable[Any] = ()) -> Callable[[], Any]:
    """A ``context_fn`` for ``torch.utils.checkpoint``, in eager and in compiled code.

    Losses and gradients are bitwise those without checkpointing. Bytes below are of one token and one Llama layer of
    4096/14336 features with 8 heads for keys and values, in bf16, the layer's input included; without checkpointing
    bf16 saves 148 kB, and checkpointing that saves nothing else 8 kB.

    Args:
        keep: "bf16" saves what the usual policy for bf16 does: attention, and of products of one shape every second
            (54 kB; k or v, o and up are multiplied again). "gemms" saves every product that backward reads (92 kB;
            nothing is multiplied again).
        save: operators whose results are saved besides, ``torch.ops.aten.NAME.default``.

    Returns:
        What ``checkpoint(function, *args, use_reentrant=False, context_fn=...)`` and
        ``checkpoint_wrapper(module, context_fn=...)`` take.

    Raises:
        Float8ConfigError: no such ``keep``.
    """
    if keep not in KEEP:
        raise unknown("keep", keep, KEEP)
    every_product, saved = keep == "gemms", ATTENTION | COMMUNICATION | set(save)

    def contexts() -> Any:
        seen: Counter[Any] = Counter()

        def decide(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            is_saved = func in saved
            if func in PRODUCTS and not is_saved:
                # As text, for a size that is symbolic while a graph is traced cannot be hashed.
                key = ctx.is_recompute, func, *(str(a.shape) for a in args if isinstance(a, torch.Tensor))
                seen[key] += 1
                is_saved = every_product or seen[key] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)

    return contexts
