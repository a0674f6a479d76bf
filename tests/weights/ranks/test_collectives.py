"""A collective writes to a weight: the next forward reads what it left, of a weight that is whole and of a shard."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import f8sub
from tests.data_sets import gaussian, generator

ROWS, COLS = 64, 48


def values(like: torch.Tensor, seed: int = 5) -> torch.Tensor:
    return 3 * gaussian(tuple(like.shape), generator(seed))


def exchange(weight: torch.Tensor) -> None:
    """Point to point, both ways."""
    sent = dist.isend(values(weight), 1 - dist.get_rank())
    dist.recv(weight, 1 - dist.get_rank())
    sent.wait()


def broadcast(weight: torch.Tensor) -> None:
    """From each rank to the other."""
    for source in range(2):
        dist.broadcast(values(weight) if dist.get_rank() == source else weight, source)


def scatter(weight: torch.Tensor) -> None:
    dist.scatter(weight, [values(weight), values(weight, 6)] if dist.get_rank() == 0 else None)


COLLECTIVES = {
    "broadcast": broadcast,
    "all_reduce": dist.all_reduce,
    "all_reduce-asynchronous": lambda w: dist.all_reduce(w, async_op=True).wait(),
    "scatter": scatter,
    "recv": exchange,
    "all_gather": lambda w: dist.all_gather([w, torch.empty_like(w)], values(w)),
    "all_gather_into_tensor": lambda w: dist.all_gather_into_tensor(w, values(w[: len(w) // 2].contiguous())),
    "reduce_scatter_tensor": lambda w: dist.reduce_scatter_tensor(w, values(torch.cat([w, w]))),
    "all_to_all_single": lambda w: dist.all_to_all_single(w, values(w)),
}


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("name", COLLECTIVES, ids=list(COLLECTIVES))
def test_the_forward_after_it_reads_what_it_left(rank, world, name, sharded):
    torch.manual_seed(1)
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(COLS, ROWS, bias=False)), skip_defaults=False)
    if sharded:
        fully_shard(model)
        f8sub.precompute_scales(model)
    x = gaussian((16, COLS), generator(2))
    with torch.no_grad():
        before = model(x)
        if sharded:
            model.reshard()
        weight = model[0].weight
        COLLECTIVES[name](weight.to_local() if sharded else weight)
        after = model(x)
        if sharded:
            model.reshard()
        whole = model[0].weight.full_tensor() if sharded else model[0].weight
        plain = nn.Linear(COLS, ROWS, bias=False)
        plain.weight.copy_(whole)
        expected = f8sub.convert_to_float8(nn.Sequential(plain), skip_defaults=False)(x)
    assert not torch.equal(after, before)
    assert torch.equal(after, expected)
