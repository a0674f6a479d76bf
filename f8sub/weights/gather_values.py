"""``dist.all_gather_object`` without NumPy, of what JSON can say."""

import json
from typing import Any

import torch
import torch.distributed as dist

from f8sub.torch_compat import device_of_objects


def gather_values(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank of a group says, in the order of the ranks; ``dist.all_gather_object`` needs NumPy.

    Args:
        mine: what JSON can say.
        group: None for all ranks of the job.
    """
    device, world = device_of_objects(group), dist.get_world_size(group)
    said = list(json.dumps(mine).encode())
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(said)], dtype=torch.int64, device=device), group=group)
    longest = max(int(size) for size in sizes)
    texts = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    padded = said + [0] * (longest - len(said))
    dist.all_gather(texts, torch.tensor(padded, dtype=torch.uint8, device=device), group=group)
    return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes, strict=True)]
