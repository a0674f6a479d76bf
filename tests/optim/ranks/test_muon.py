"""torch.optim.Muon on sharded weights gathered as float8: the bits of a gather in bf16, and of plain weights."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import f8sub
from tests.models import BF16, loss_of, shard, transformer

STEPS = 4
RATE = 2e-2


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest, as in its paper."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return [torch.optim.Muon(matrices, lr=RATE), torch.optim.AdamW(others, lr=1e-3, fused=True)]


def train(rank: int, all_gather: bool) -> tuple[list[float], nn.Module]:
    model = shard(transformer("tensorwise", all_gather=all_gather), BF16)
    optimizers = optimizers_of(model)
    f8sub.precompute_scales(model)
    f8sub.register_precompute_hook(optimizers[0], model)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, rank)
        loss.backward()
        for optimizer in reversed(optimizers):  # Muon, which has the hook, steps last
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.long
def test_losses_are_those_of_a_gather_in_bf16(rank, world):
    (losses, model), (expected, _) = train(rank, True), train(rank, False)
    assert losses == expected
    assert len(set(losses)) == STEPS
    layers = [layer for layer in model.modules() if isinstance(layer, f8sub.Float8Linear)]
    assert layers
    assert all(isinstance(layer.weight, DTensor) for layer in layers)


def plain(tensor: DTensor) -> DTensor:
    """The same shards without a class of f8sub's."""
    local = tensor.to_local().detach()
    local = getattr(local, "plain", local).clone()
    assert type(local) is torch.Tensor
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )


def test_a_step_is_that_of_plain_weights(rank, world):
    model = shard(transformer("tensorwise"), BF16)
    muon, _ = optimizers_of(model)
    f8sub.precompute_scales(model)
    loss_of(model, 0, rank).backward()
    sharded = muon.param_groups[0]["params"]
    expected = [nn.Parameter(plain(parameter)) for parameter in sharded]
    before = [parameter.full_tensor() for parameter in sharded]
    for parameter, with_gradient in zip(expected, sharded, strict=True):
        parameter.grad = plain(with_gradient.grad)
    torch.optim.Muon(expected, lr=RATE).step()
    muon.step()
    for parameter, of_muon, old in zip(sharded, expected, before, strict=True):
        assert torch.equal(parameter.full_tensor(), of_muon.full_tensor())
        assert not torch.equal(parameter.full_tensor(), old)


def test_of_several_models_the_hook_refuses_another_ones_muon(rank, world):
    model, other = (shard(transformer("tensorwise"), BF16) for _ in range(2))
    with pytest.raises(f8sub.Float8ConfigError, match="the Muon steps no parameter of the model"):
        f8sub.register_precompute_hook(optimizers_of(other)[0], model)
