"""SwiGLU's input in float8 where each rank has some of the columns, or a shard of the weights."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import FeedForward

WIDTH, HIDDEN, TOKENS = 64, 512, 32


def made() -> FeedForward:
    torch.manual_seed(0)
    model = f8sub.convert_to_float8(FeedForward(WIDTH, HIDDEN).bfloat16(), "rowwise", skip_defaults=False)
    f8sub.keep_swiglu_input_in_float8(model)
    return model


def trained(model: nn.Module) -> torch.Tensor:
    x = gaussian((TOKENS, WIDTH), generator(1)).bfloat16()
    y = model(x)
    y.backward(gaussian((TOKENS, WIDTH), generator(2)).bfloat16())
    return y


def test_results_of_columns_are_rounded_as_those_of_all(rank, world):
    whole, model = made(), made()
    x = gaussian((TOKENS, WIDTH), generator(1)).bfloat16()
    expected = whole.gate_proj(x), whole.up_proj(x)
    mesh = init_device_mesh("cpu", (world,))
    columns = ColwiseParallel(use_local_output=False)
    plan = {"gate_proj": columns, "up_proj": columns, "down_proj": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    found = model.gate_proj(x), model.up_proj(x)
    assert all(torch.equal(a.full_tensor(), b) for a, b in zip(found, expected, strict=True))
    y = trained(model)
    torch.testing.assert_close(y, trained(whole), rtol=0.05, atol=0.05)
    gradient = model.gate_proj.weight.grad.full_tensor()
    torch.testing.assert_close(gradient, whole.gate_proj.weight.grad, rtol=0.1, atol=0.1)


def test_sharded_is_unsharded(rank, world):
    whole, model = made(), fully_shard(made())
    assert torch.equal(trained(model), trained(whole))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad.full_tensor(), whole.get_parameter(name).grad)
