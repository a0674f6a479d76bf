"""WireWeight: a master weight whose shards FSDP2 gathers as float8.

    shard --fsdp_pre_all_gather--> uint8 codes --all-gather--> --fsdp_post_all_gather--> Float8Tensor(rowwise)

One uint8 input for each weight, with scales either as metadata or in its rows: the only form that is right for uneven
and empty shards, Shard(1), shard groups of one, HSDP, gloo and NCCL alike. The hooks keep nothing: FSDP2 calls them
more often than once a pass.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from f8sub.errors import Float8ConfigError
from f8sub.formats import ALL, Float8Format, Operand
from f8sub.linear.float8_linear import Float8Linear
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import preset_signature
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.scale_table import ScaleTable
from f8sub.weights.shard import Shard
from f8sub.weights.sharded_weights import ShardedConversion

Metadata = tuple[Shard, ScaleTable, str | None]
"""The shard, its table, and the ticket of ``gather_input``."""


class WireWeight(MasterWeight):
    """See the module's docstring; FSDP2 finds the two hooks on the local tensor."""

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor], Metadata]:
        """This rank's codes, cast once a step.

        Returns:
            One uint8 tensor of the padded shard's shape, and the metadata for ``fsdp_post_all_gather``.
        """
        if not isinstance(module, Float8Linear):
            raise Float8ConfigError(
                f"a {type(self).__name__} is a parameter of a {type(module).__name__}; only a Float8Linear knows the "
                "recipe to gather it with"
            )
        shard, table = ShardedConversion.of(module.converted).shard_of(module)
        codes, ticket = table.gather_input(shard, self, mp_policy.param_dtype or self.dtype)
        return (codes,), (shard, table, ticket)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor],
        metadata: Metadata,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[Float8Tensor, tuple[torch.Tensor]] | None:
        """The unsharded weight, rowwise only; its columnwise operand is made in backward and freed there.

        Later calls find codes and scales already in place: both are views of memory that FSDP2 and the scale table
        write to.
        """
        (gathered,), (shard, table, ticket) = all_gather_outputs, metadata
        table.gathered_for(shard, self, gathered, param_dtype)
        if ticket is not None:
            table.resolve(shard, self, gathered, ticket)
        if out is not None:
            return None
        codes, scale_inv = shard.wire.unsharded(gathered)
        scale_inv = shard.part_scale_inv if scale_inv is None else scale_inv
        rowwise = Operand(codes, scale_inv, shard.format, shard.global_scale_inv)
        return Float8Tensor(rowwise, None, param_dtype), (gathered,)


class RowWireWeight(WireWeight):
    """A WireWeight whose rows are not one byte an element: packed, or followed by their scales.

    FSDP2 checks the size of what the other form of the hook returns, on ranks with a short shard alone, while the
    others wait for ever; it does not check this form, which is told less.
    """

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: DeviceMesh
    ) -> tuple[tuple[torch.Tensor], Metadata]:
        """This rank's codes and scales, cast once a step.

        Returns:
            One uint8 tensor of ``WireFormat.padded_shape``, and the metadata for ``fsdp_post_all_gather``.
        """
        shard, table = ShardedConversion.of(self.cell.layers).shard_named(self.cell.fqn)
        codes, ticket = table.gather_input(shard, self, None)
        return (codes,), (shard, table, ticket)


def wire_weight_for(format: Float8Format) -> type[WireWeight]:
    """The class that gathers weights of a rowwise format."""
    in_rows = format.tile.rows == 1 and format.tile.cols != ALL
    return RowWireWeight if in_rows or format.codes_per_byte > 1 else WireWeight


preset_signature(WireWeight.fsdp_pre_all_gather)
preset_signature(RowWireWeight.fsdp_pre_all_gather)
