"""The ranks on which DistributedDataParallel keeps copies of layers, and maxima over them."""

import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from f8sub.errors import Float8ConfigError
from f8sub.torch_compat import is_joining, leave_buffers
from f8sub.weights.ranks import own_group


class Replicas:
    """The ranks that DistributedDataParallel keeps copies of the layers on.

    From now on DDP leaves these buffers alone. It would broadcast rank 0's at every forward, and those have not seen
    the other ranks' microbatches of this step.
    """

    def __init__(self, ddp: DistributedDataParallel, buffers: Iterable[str]) -> None:
        ranks = tuple(sorted(dist.get_process_group_ranks(ddp.process_group)))
        # Collectives of others cannot cross it.
        self._group = own_group(ranks, next(ddp.module.parameters()).device.type) if len(ranks) > 1 else None
        self._ddp = weakref.ref(ddp)
        leave_buffers(ddp, buffers)

    def maximum(self, staged: torch.Tensor, fqn: str) -> torch.Tensor:
        """The maximum over the ranks of what each staged.

        Raises:
            Float8ConfigError: within ``ddp.join()``: ranks that have no more inputs step no optimizer, and the others
                would wait for them.
        """
        if (ddp := self._ddp()) is not None and is_joining(ddp):
            raise Float8ConfigError(
                f"{fqn}: its amax histories are shared by DDP's ranks at every optimizer step, and inside "
                "of ddp.join() ranks may step differently often; give every rank as many batches, or take a recipe "
                "with current scaling"
            )
        maximum = staged.clone(memory_format=torch.contiguous_format)
        if self._group is not None:
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self._group.of_next_call())
        return maximum
