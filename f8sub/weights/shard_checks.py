"""ShardChecks: errors on every rank, before the first collective that depends on what is wrong."""

from collections.abc import Sequence

from typing_extensions import override

from f8sub.errors import Float8ConfigError
from f8sub.torch_compat import fsdp_params, module_of
from f8sub.weights.conversion import ParamDtypes
from f8sub.weights.exchange import Exchange
from f8sub.weights.guests import Guest
from f8sub.weights.layout import ShardLayout
from f8sub.weights.rank_check import compare
from f8sub.weights.weight import WeightRecord


class ShardChecks(Guest):
    """Compares the ranks' weights, and then looks whether those can be gathered as float8."""

    @override
    def entered(
        self, members: Sequence[tuple[WeightRecord, ShardLayout]], dtypes: ParamDtypes, exchange: Exchange
    ) -> None:
        if len(exchange.layout.ranks) > 1:
            compare([record for record, _ in members], dtypes, exchange)
        gathered = [each for each in members if each[0].gathered]
        if gathered:
            _refuse_resharding([record for record, _ in gathered])
        for record, layout in gathered:
            if (record.module, record.name) in dtypes:
                _refuse_cuts(record, layout)


def _refuse_resharding(records: Sequence[WeightRecord]) -> None:
    """FSDP2 gathers anew what it kept of a weight after forward, without the hooks that say what it is."""
    kept = {module_of(p) for g, p in fsdp_params() if g.post_forward_mesh_info not in (None, g.mesh_info)}
    if fqns := sorted({record.fqn for record in records if record.module in kept}):
        raise Float8ConfigError(
            f"{fqns[0]} and {len(fqns) - 1} more: sharded with reshard_after_forward=<int>, which FSDP2 does not "
            "do for weights with all-gather hooks (torch raises NotImplementedError in backward); pass True or "
            "False to fully_shard, or convert with float8_all_gather=False"
        )


def _refuse_cuts(record: WeightRecord, layout: ShardLayout) -> None:
    """No GEMM could read codes that are torn apart, or the scales of tiles that reach out of a part."""
    if (format := record.format) is None:
        return
    if format.codes_per_byte > 1 and layout.dim != 0:
        raise Float8ConfigError(
            f"{record.fqn}: its weight is sharded by columns (Shard({layout.dim})), which FSDP2 "
            f"puts together from one byte an element, and {format} has two in one; "
            "shard it by rows, or convert with float8_all_gather=False"
        )
    for dim, part in layout.cuts:
        layout.format_of(format, record.fqn).tile.check_cut(
            dim, layout.whole[dim], part, f"{record.fqn}: its weight {layout.whole}"
        )
