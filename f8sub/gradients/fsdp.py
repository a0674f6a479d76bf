"""How FSDP2 reduces the gradients of a module's parameters."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from f8sub.errors import Float8ConfigError
from f8sub.torch_compat import reduce_dtype, reduce_scatter_of, reduced_groups, shard_ranks

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def factor_of(op: Any, ranks: int) -> float:
    """What a reduction by ``op`` multiplies a sum over ``ranks`` by.

    Raises:
        Float8ConfigError: ``op`` is neither sum nor mean.
    """
    kind, factor = (op, None) if isinstance(op, dist.ReduceOp.RedOpType) else op.__getstate__()
    factors = {dist.ReduceOp.SUM: 1.0, dist.ReduceOp.AVG: 1 / ranks, dist.ReduceOp.PREMUL_SUM: factor}
    found = factors.get(kind)
    if found is None:
        raise Float8ConfigError(
            f"FSDP2 was to reduce gradients by {op}; reduce_gradients_in_float8 has sums and means"
        )
    return float(found)


class Reduction(NamedTuple):
    """How FSDP2 reduces the gradients of a module's parameters.

    Attributes:
        key: the same object for modules whose parameters are one group.
        ranks: the process group over which they are sharded; None where they are not.
        dtype: of the sum.
        device: of the sum.
        comm: FSDP2's ``ReduceScatter``.
        is_default: whether that is torch's own.
    """

    key: Any
    ranks: Any
    dtype: torch.dtype
    device: torch.device
    comm: Any
    is_default: bool


def reductions(module: "FSDPModule") -> list[Reduction]:
    """Those of the parameters that ``fully_shard`` put together for ``module``, one for each mesh."""
    return [
        Reduction(group, shard_ranks(group), reduce_dtype(group), group.device, *reduce_scatter_of(group))
        for group in reduced_groups(module)
    ]
