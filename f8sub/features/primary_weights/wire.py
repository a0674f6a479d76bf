"""Primary weights whose codes FSDP2 gathers: they are the wire's bytes, so nothing is kept twice."""

import torch

from f8sub.features.primary_weights.primary_weight import PrimaryWeight
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.wire_weight import Metadata, RowWireWeight, WireWeight


class WirePrimaryWeight(PrimaryWeight):
    """The primary weight whose master is a WireWeight."""

    fsdp_pre_all_gather = WireWeight.fsdp_pre_all_gather

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor],
        metadata: Metadata,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[Float8Tensor, tuple[torch.Tensor]] | None:
        """As of a WireWeight; a master that is to be dropped goes once its fresh codes were gathered."""
        made = WireWeight.fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, out=out)  # type: ignore[arg-type]
        shard, *_, ticket = metadata
        if self.primary.dropping and ticket is None:
            shard.drop_master()
            self.primary.drop(shard)
        return made


class RowWirePrimaryWeight(WirePrimaryWeight):
    """The primary weight whose master is a RowWireWeight."""

    fsdp_pre_all_gather = RowWireWeight.fsdp_pre_all_gather  # type: ignore[assignment]


def primary_weight_for(master: MasterWeight) -> type[PrimaryWeight]:
    """The class of the primary weight of a master."""
    return RowWirePrimaryWeight if isinstance(master, RowWireWeight) else WirePrimaryWeight
