"""FSDP1, torch's FullyShardedDataParallel: it makes one flat parameter of many weights, and gathers no float8."""

import functools
import warnings
from typing import Any

import torch
from typing_extensions import override

from f8sub.errors import Float8Warning
from f8sub.torch_compat import flattened_by_fsdp1, remove_hook
from f8sub.weights.conversion import Conversion
from f8sub.weights.guests import LayerGuest


class Fsdp1(LayerGuest):
    """Looks, at a model's first forward, who shards its weights."""

    @override
    def converted(self, model: torch.nn.Module, conversion: Conversion) -> None:
        model.register_forward_pre_hook(functools.partial(warn_of_fsdp1, conversion))


def warn_of_fsdp1(conversion: Conversion, module: torch.nn.Module, args: Any) -> None:
    """Forward pre-hook of a converted model: a ``Float8Warning`` where FSDP1 flattened its weights, once."""
    if torch.compiler.is_compiling():
        return
    remove_hook(warn_of_fsdp1, module)
    names = {record.module: record.fqn for record in conversion}
    if layers := [names[layer] for layer in flattened_by_fsdp1(module, names)]:
        warnings.warn(
            f"{layers[0]} and {len(layers) - 1} more layers in float8 are sharded by FSDP1 (FullyShardedDataParallel), "
            "which flattens their weights: they are gathered in high precision, and each layer casts its own again in "
            "every forward. Shard with torch.distributed.fsdp.fully_shard, which gathers float8",
            Float8Warning,
            stacklevel=2,
        )
