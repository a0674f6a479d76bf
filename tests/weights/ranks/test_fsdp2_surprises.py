"""What FSDP2 does where one would guess otherwise, with float8 layers in it: rows of docs/behaviour.md."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import f8sub
from f8sub.torch_compat import forget_pass
from tests.data_sets import gaussian, generator
from tests.models import precompute, seed_weights

K = 64


def model_of() -> nn.Module:
    model = f8sub.convert_to_float8(seed_weights(nn.Sequential(nn.Linear(K, K), nn.Linear(K, K))))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    precompute(model)
    return model


def gradients(model: nn.Module, *microbatches: torch.Tensor, dropped: torch.Tensor | None = None):
    if dropped is not None:
        model.set_requires_gradient_sync(False)
        model(dropped).square().sum().backward()
        model.set_requires_gradient_sync(True)
        model.zero_grad()
    for x in microbatches:
        model(x).square().sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def test_zero_grad_leaves_gradients_that_wait_for_a_reduction(rank, world):
    x, other = (gaussian((32, K), generator(10 * i + rank)) for i in range(2))
    alone, both = gradients(model_of(), x), gradients(model_of(), x, dropped=other)
    assert all(not torch.allclose(a, b, rtol=0.1) for a, b in zip(alone, both, strict=True))


def test_a_layer_that_is_sharded_after_others_ran_is_refused(rank, world):
    model = f8sub.convert_to_float8(seed_weights(nn.Sequential(nn.Linear(K, K), nn.Linear(K, K))))
    x = gaussian((32, K), generator(rank))
    fully_shard(model[0])
    model[0](x).backward(gaussian((32, K), generator(10 + rank)))
    fully_shard(model[1])
    told = (
        "1: its weight was sharded after other layers of the same model were trained or run; call fully_shard"
    )
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        model(x)


def fails(*_: object) -> None:
    raise RuntimeError("in the middle")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_pass_that_an_error_ended_is_forgotten(rank, world, where):
    """As after the capture of a CUDA graph that failed: the next pass is that of a model without one."""
    x, other = (gaussian((32, K), generator(10 * i + rank)) for i in range(2))
    model, twin = model_of(), model_of()
    if where == "forward":
        handle = model[1].register_forward_hook(fails)
    else:
        handle = model[0].register_forward_hook(lambda module, args, y: y.register_hook(fails) and None)
    with pytest.raises(RuntimeError, match="in the middle"):
        model(other).square().sum().backward()
    handle.remove()
    forget_pass(model)
    # The module whose backward came to its end has a gradient, as it has in a step that is launched.
    model.zero_grad()
    for _ in range(2):
        found, expected = gradients(model, x), gradients(twin, x)
        assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * 4


def test_a_policy_casts_positions_wherever_they_are(rank, world):
    """Positions beyond 256 collide in bfloat16; integers stay."""
    seen: dict[str, torch.Tensor] = {}

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(K, K)

        def forward(self, x: torch.Tensor, *, where: dict[str, torch.Tensor]) -> torch.Tensor:
            seen.update(where)
            return self.layer(x)

    model = fully_shard(
        f8sub.convert_to_float8(Attends()), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    precompute(model)
    positions = torch.arange(1000)
    model(gaussian((16, K), generator(rank)), where={"floats": positions.float(), "integers": positions})
    assert seen["floats"].dtype == torch.bfloat16
    assert len(seen["floats"].unique()) < 600
    assert torch.equal(seen["integers"], positions)


def test_an_assignment_to_data_is_ignored(rank, world):
    """Of a DTensor: its shard, which everything reads, stays; in place it is written."""
    model = model_of()
    x = gaussian((32, K), generator(rank))
    y = model(x).detach()
    for p in model.parameters():
        p.data = p.data * 0
    assert torch.equal(model(x), y)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    precompute(model)
    assert not model(x).any()


def test_a_first_forward_in_inference_mode_ends_training(rank, world):
    """Its gathered tensors are inference tensors, and FSDP2 keeps them; after a training forward it may come."""
    x = gaussian((32, K), generator(rank))

    def plain() -> nn.Module:
        model = seed_weights(nn.Sequential(nn.Linear(K, K), nn.Linear(K, K)))
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    def evaluate(model: nn.Module) -> None:
        with torch.inference_mode():
            model(x)
        for module in (*model, model):
            module.reshard()

    late = plain()
    late(x).square().sum().backward()
    evaluate(late)
    late(x).square().sum().backward()
    first = plain()
    evaluate(first)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        first(x).square().sum().backward()
