"""fuse_step on a GPU: the bits of torch's fused AdamW; under FSDP2. In a CUDA graph: test_graph_step.py."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import f8sub
from f8sub.optim import fuse_step
from f8sub.weights.fused_step import total_norm
from tests.cuda.test_graph_step import (
    STEPS,
    adamw,
    batch_of,
    function_of,
    sharded_model,
)
from tests.experts.models import OwnExperts
from tests.models import Stack, float8_layers, seed_weights, shard_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def network(dtype: torch.dtype) -> nn.Module:
    """With parts that are no multiples of 16 elements, and more than one program's."""
    return seed_weights(Stack(96, 304, 1600, 47)).to(dtype).cuda()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
def test_the_bits_are_torchs(dtype, decay, tensor_lr):
    models = network(dtype), network(dtype)
    lr = torch.tensor(3e-3, device="cuda") if tensor_lr else 3e-3
    optimizers = [adamw(model, lr=lr, weight_decay=decay) for model in models]
    fused = fuse_step(optimizers[0])
    for seed in range(5):
        for model in models:
            torch.manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
        # By one norm: f8sub's may have another last bit.
        fused.clip_by(nn.utils.clip_grad_norm_(models[1].parameters(), 1.0), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        assert fused.why_torch is None
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    for number, state in states[0].items():
        for name, value in state.items():
            assert torch.equal(value, states[1][number][name])


def test_the_norm():
    gradients = [torch.randn(size, device="cuda") for size in ((4096, 4096), (1000003,), (7,))]
    right = sum(gradient.double().square().sum() for gradient in gradients).sqrt()
    found = total_norm(gradients)
    assert abs(found.double() - right) <= 2.0**-22 * right


def test_amaxes_of_sharded_weights(ranks):
    ranks(1, amaxes_are_of_the_weights, gpus=True, timeout=240)


def amaxes_are_of_the_weights(rank: int, world: int) -> None:
    """Without a read of the weights; one that is written to afterwards is read."""
    model = sharded_model(rank, world, "tensorwise", "eager")
    optimizer = adamw(model)
    fused = fuse_step(optimizer)
    forward_backward = function_of(model, clip=False)
    for step in range(STEPS // 2):
        forward_backward(*(each.cuda() for each in batch_of(step)))
        fused.clip_grad_norm_(1.0)
        optimizer.step()
        assert fused.why_torch is None
        layers = float8_layers(model)
        if step == 3:
            with torch.no_grad():
                layers[0].weight.mul_(3.0)
        known = [shard_of(layer).amax_now for layer in layers]
        assert [amax is None for amax in known] == [step == 3 and layer is layers[0] for layer in layers]
        f8sub.precompute_scales(model)
        for layer in layers:
            amax = shard_of(layer).scales.amax
            assert amax.item() == layer.weight.full_tensor().abs().max().item()
        optimizer.zero_grad()


def test_amaxes_of_sharded_experts(ranks):
    ranks(1, amaxes_are_of_the_experts, gpus=True, timeout=240)


def amaxes_are_of_the_experts(rank: int, world: int) -> None:
    """Found by the step where an expert is of whole programs; else, and of one that was written to, by a launch."""
    f8sub.register_experts(OwnExperts)
    model = nn.ModuleList([OwnExperts(8, 1024, 768), OwnExperts(3, 48, 16)]).cuda()
    f8sub.convert_to_float8(model, experts=True)
    for layer in model:
        fully_shard(layer)
    # Else the first step is over weights of which no amax was asked yet.
    f8sub.precompute_scales(list(model))
    optimizer = adamw(model)
    fused = fuse_step(optimizer)
    for step in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        fused.clip_grad_norm_(1.0)
        optimizer.step()
        assert fused.why_torch is None
        if step == 2:
            with torch.no_grad():
                model[0].up.mul_(3.0)
        f8sub.precompute_scales(list(model))
        for layer in model:
            conversion = layer._f8sub.conversion
            for name, parameter in layer.named_parameters():
                shard = conversion.shard_of(conversion.record_of(layer, name))
                is_known = layer is model[0] and not (step == 2 and name == "up")
                assert (shard.amax_now is not None) == is_known
                right = parameter.full_tensor().flatten(1).abs().amax(1)
                assert torch.equal(shard.scales.amax.flatten(), right)
