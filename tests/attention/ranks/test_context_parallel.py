"""torch's own context parallelism, ring and all-gather, trains float8 layers; gloo has no attention, so it gets one."""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method

import f8sub
from f8sub.attention.state import CHILD
from tests.attention.models import blocks, same, tokens
from tests.budgets import decibels
from tests.selection import long_but

aten = torch.ops.aten
_library = torch.library.Library("aten", "IMPL")


def scores(q, k, causal, scale):
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf) if causal else s


def forward(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """What flash attention returns: o, the logarithms of sums, and what only dropout reads."""
    s = scores(q, k, is_causal, scale)
    lse = s.logsumexp(-1)
    nothing = torch.zeros((), dtype=torch.int64)
    return (
        *((s - lse[..., None]).exp() @ v, lse, nothing, nothing),
        *(q.shape[2], k.shape[2], nothing, nothing, nothing),
    )


def backward(do, q, k, v, o, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *rng, scale=None):
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    p = (scores(q, k, is_causal, scale) - lse[..., None]).exp()
    dp = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * factor
    return dp @ k, dp.mT @ q, p.mT @ do


def scaled_dot_product_attention(q, k, v, is_causal=False, enable_gqa=False, **options):
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


@contextlib.contextmanager
def flash_on_cpus():
    """F.scaled_dot_product_attention is what torch's context parallelism shards: flash attention."""
    with contextlib.suppress(RuntimeError):  # in these ranks before
        _library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
        _library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    known, F.scaled_dot_product_attention = F.scaled_dot_product_attention, scaled_dot_product_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = known


def model(recipe: str | None, all_gather: bool) -> nn.Module:
    made = blocks()
    if recipe is not None:
        f8sub.convert_to_float8(made, recipe, min_dim=0, float8_all_gather=all_gather)
    for block in made:
        fully_shard(block)
    return fully_shard(made)


def train(rank: int, recipe: str | None, method: str | None, all_gather: bool = True) -> list[torch.Tensor]:
    """Losses, and the weights after two steps; without a method of all tokens."""
    mesh = init_device_mesh("cpu", (2,))
    trained = model(recipe, all_gather)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    if recipe is not None:
        f8sub.precompute_scales(trained)
    found = []
    for seed in range(2):
        x = tokens(batch=2, length=16, seed=seed)
        target = x.flip(-1).contiguous()
        with contextlib.ExitStack() as stack:
            stack.enter_context(flash_on_cpus())
            if method is not None:
                set_rotate_method(method)
                stack.enter_context(context_parallel(mesh, buffers=[x, target], buffer_seq_dims=[1, 1]))
                assert x.shape[1] == 8
            loss = (trained(x) - target).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if recipe is not None:
            f8sub.precompute_scales(trained)
        dist.all_reduce(loss := loss.detach())
        found.append(loss / 2)
    return [*found, *(p.full_tensor().detach() for p in trained.parameters())]


@pytest.mark.parametrize("method", long_but(["alltoall"], ["alltoall", "allgather"]))
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_layers_train(rank, world, recipe, method):
    """Bitwise with and without a float8 all-gather, and from run to run."""
    found = train(rank, recipe, method)
    assert same(found, train(rank, recipe, method))
    assert same(found, train(rank, recipe, method, all_gather=False))
    # Ranks attend to each other's tokens: the same as one rank with all of them.
    high = train(rank, None, method)
    assert all(decibels(a, b) > 100 for a, b in zip(train(rank, None, None), high, strict=True))
    assert all(decibels(a, b) > 20 for a, b in zip(high, found, strict=True))
    assert not same(high, found)


def test_attention_in_float8_leaves_it_as_it_was(rank, world):
    mesh = init_device_mesh("cpu", (2,))
    plain, changed = blocks(), blocks()
    f8sub.attend_in_float8(changed, backend="reference", min_length=0)
    found = []
    for each in (plain, changed):
        x = tokens(length=16)
        with flash_on_cpus(), context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            found.append(each(x))
    assert torch.equal(*found)
    assert not getattr(changed[0].attention, CHILD).history.any()


def test_compiled_attention_in_float8_leaves_it_as_it_was(rank, world):
    """A state would see this rank's tokens alone."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2,))
    plain, changed = blocks(1), blocks(1)
    f8sub.attend_in_float8(changed, backend="reference", min_length=0)
    call = torch.compile(changed, backend="eager")
    found = []
    for each in (plain, call):
        x = tokens(length=16)
        with flash_on_cpus(), context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            found.append(each(x))
    assert torch.equal(*found)
    assert not getattr(changed[0].attention, CHILD).history.any()
