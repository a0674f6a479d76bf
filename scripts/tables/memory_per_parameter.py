"""Bytes that a parameter takes on its way through training, for each of the places that its master may be.

Measured after two AdamW steps and a forward, whose codes a backward would let go, unsharded and on two gloo ranks with
FSDP2: every storage that is alive and was not before the model was made, by what holds it. No gradients: they are freed
by then. Per parameter of the model, all ranks together.

    python scripts/tables/memory_per_parameter.py --write-docs
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import f8sub
from f8sub.weights.primary_weight import PrimaryWeight
from f8sub.weights.shard import PendingCodes
from scripts.bench.ranks import on_ranks
from scripts.table import Table, finish, parser

SIZE, LAYERS, WORLD = 256, 4, 2
SETUPS = {
    "float32 weights": (torch.float32, False),
    "bf16 weights, float32 masters": (torch.bfloat16, False),
    "float8 primary weights, float32 masters": (torch.bfloat16, True),
    "frozen float8 primary weights": (torch.bfloat16, True),
}
HOLDERS = ("weights", "masters", "optimizer states", "codes", "other")
WITHOUT_STORAGE = (PrimaryWeight, f8sub.Float8Tensor, PendingCodes)
"""What these are made of, if anything, is found by itself."""

FLOAT8 = {torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2}


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by address of what real memory tensors hold; a tensor without a storage of its own holds none."""
    found = {}
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local.device.type != "meta" and not isinstance(local, WITHOUT_STORAGE):
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return {address: size for address, size in found.items() if size}


def alive(dtypes: set[torch.dtype] | None = None) -> dict[int, int]:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return storages(t for t in tensors if dtypes is None or t.dtype in dtypes)


def trained(name: str, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    dtype, primary = SETUPS[name]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS))).to(dtype)
    f8sub.convert_to_float8(model, primary_weights=primary)
    if sharded:
        for module in (*model, model):
            fully_shard(module)
    frozen = name.startswith("frozen")
    optimizer = None if frozen else torch.optim.AdamW(model.parameters(), lr=1e-3)
    if frozen:
        f8sub.drop_high_precision(model.requires_grad_(False))
    elif dtype == torch.bfloat16:
        optimizer = f8sub.optim.MasterWeights(optimizer)
    for _ in range(2):
        f8sub.precompute_scales(model)
        y = model(torch.randn(16, SIZE, dtype=dtype, requires_grad=True))
        y.square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    f8sub.precompute_scales(model)
    with torch.no_grad():
        model(torch.randn(16, SIZE, dtype=dtype))
    if sharded:
        for module in (*model, model):
            module.reshard()
        time.sleep(0.2)  # gloo's threads let go of the last all-gather's output after the ranks went on
    return model, optimizer


def bytes_per_parameter(name: str, world: int) -> dict[str, float]:
    before = alive()
    model, optimizer = trained(name, sharded=world > 1)
    stepped = getattr(optimizer, "optimizer", optimizer)
    groups, states = (stepped.param_groups, stepped.state.values()) if stepped else ([], [])
    parts = {
        "weights": storages(model.parameters()),
        "masters": storages(parameter for group in groups for parameter in group["params"]),
        "optimizer states": storages(tensor for state in states for tensor in state.values()),
        "codes": alive(FLOAT8),
        "other": alive(),
    }
    counted, result = set(before), {}
    for holder, found in parts.items():
        result[holder] = sum(size for address, size in found.items() if address not in counted)
        counted |= set(found)
    result["total"] = sum(result.values())
    numel = LAYERS * SIZE * SIZE
    return {holder: count * world / numel for holder, count in result.items()}


def figures(world: int) -> dict[str, dict[str, float]]:
    """Bytes a parameter by holder, by setup, of this process's share times ``world``."""
    bytes_per_parameter("float32 weights", world)  # what first calls allocate for good
    return {name: bytes_per_parameter(name, world) for name in SETUPS}


def table(found: dict[str, dict[str, dict[str, float]]]) -> Table:
    lines = [
        [f"{name}, {ranks}", *(f"{row[holder]:.2f}" for holder in (*HOLDERS, "total"))]
        for name in SETUPS
        for ranks, row in ((ranks, rows[name]) for ranks, rows in found.items())
    ]
    return Table("Bytes a parameter, all ranks together", ["", *HOLDERS, "total"], lines)


def main() -> None:
    arguments = parser(__doc__, "memory_per_parameter").parse_args()
    found = {f"{world} rank{'s' * (world > 1)}": on_ranks(world, figures, world)[0] for world in (1, WORLD)}
    finish(arguments, found, table(found))


if __name__ == "__main__":
    main()
