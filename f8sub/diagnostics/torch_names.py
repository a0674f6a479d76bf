"""What f8sub needs of torch beyond what that documents: looked at, and FSDP2's part tried with one small layer."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from f8sub.convert.convert import convert_to_float8
from f8sub.errors import Float8ConfigError
from f8sub.torch_compat import GATHER, NEEDS, REDUCTION, Need, problems, reduced_groups

ROWS, COLS = 32, 48


@dataclass(frozen=True, slots=True)
class TorchNames:
    """What was found of one ``torch_compat.Need``.

    Attributes:
        purpose: what it is needed for.
        instead: what works without; empty where nothing does.
        problem: what is missing, or is not as f8sub knows it; None where all is.
    """

    purpose: str
    instead: str
    problem: str | None


def look_at_torch() -> tuple[TorchNames, ...]:
    """Every need, those of FSDP2 by sharding a layer over one rank, too, where this process has no ranks yet."""
    found = {need: "; ".join(problems(need)) or None for need in NEEDS}
    if not any(found.values()) and not dist.is_initialized():
        distributed: Any = dist
        dist.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            found |= _tried()
        finally:
            dist.destroy_process_group()
    return tuple(TorchNames(need.purpose, need.instead, problem) for need, problem in found.items())


def _tried() -> dict[Need, str | None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rng = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLS, generator=rng, dtype=torch.float32, device="cpu")
    whole, sharded = _layer(rng), _layer(rng)
    sharded.load_state_dict(whole.state_dict())
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    found: dict[Need, str | None] = dict.fromkeys((GATHER, REDUCTION))
    try:
        if not torch.equal(sharded(x), whole(x)):
            found[GATHER] = "a gathered layer's output is not that of a whole one"
    except (Float8ConfigError, AttributeError, TypeError) as error:
        found[GATHER] = str(error)
    try:
        reduced_groups(sharded)
    except Float8ConfigError as error:
        found[REDUCTION] = str(error)
    return found


def _layer(rng: torch.Generator) -> Any:
    layer = torch.nn.Linear(COLS, ROWS, bias=False, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        layer.weight.normal_(generator=rng)
    return convert_to_float8(torch.nn.Sequential(layer), min_dim=1, skip_defaults=False)
