"""How torch and its FSDP2 reduce gradients."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from f8sub.errors import Float8ConfigError
from f8sub.torch_compat import param_groups, reduce_dtype

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sums by ``dist.reduce_scatter_single``, which torch before 2.13 calls ``reduce_scatter_tensor``."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    getattr(dist, name)(output, input, group=group)


def chunk_cat(gradients: Sequence[torch.Tensor], ranks: int, out: torch.Tensor) -> None:
    """FSDP2's copy of gradients into the memory of a reduction; since torch 2.15 they may be of several dtypes."""
    name = "chunk_cat_mixed_dtype" if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype") else "chunk_cat"
    getattr(torch.ops.fsdp, name)(gradients, dim=0, num_chunks=ranks, out=out)


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
        Reduction(
            group,
            getattr(group.mesh_info, "shard_process_group", None),
            reduce_dtype(group),
            group.device,
            group._reduce_scatter_comm,
            type(group._reduce_scatter_comm).__name__ == "DefaultReduceScatter",
        )
        for group in param_groups(module._get_fsdp_state())
    ]
