"""A whole training step that a CUDA graph captures, of weights that are not sharded. tests/cuda replays one."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import f8sub
from f8sub.delayed import histories
from f8sub.weights import master_weight
from tests.models import loss_of, take_step, transformer

RECIPES = ("rowwise", "blockwise", "gridquant", "mxfp8", "nvfp4")
"""Without delayed scaling; tensorwise reads amaxes on the host, on CPUs."""


class Capture(TorchDispatchMode):
    """As CUDA while it captures: the host reads no value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, f8sub.Float8Tensor) for kind in types):
            return NotImplemented  # a product of operands, which consists of other operators
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing: the host reads a value")
        return func(*args, **(kwargs or {}))


def trained(recipe: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = transformer(recipe, spread=2.0).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True, capturable=True)
    take_step(optimizer, loss_of(model, 0, 0))
    f8sub.precompute_scales(model)
    return model, optimizer


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_host_reads_nothing_and_what_replays_write_to_weights_is_seen(recipe, monkeypatch):
    model, optimizer = trained(recipe)
    with monkeypatch.context() as captured, Capture():
        captured.setattr(master_weight, "is_capturing", lambda tensor: True)
        loss_of(model, 1, 0).backward()
        optimizer.step()
        f8sub.precompute_scales(model)
    loss_of(model, 2, 0)  # casts all weights
    for parameter in model.parameters():  # by no operator that Python sees
        preserved = torch.autograd._unsafe_preserve_version_counter(parameter)
        with torch.no_grad(), torch._C._DisableTorchDispatch(), preserved:
            parameter.mul_(-1.5)
    found = loss_of(model, 3, 0)
    twin = transformer(recipe).bfloat16()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(found, loss_of(twin, 3, 0))


def test_histories_do_not_roll_in_a_graph(monkeypatch):
    model, optimizer = trained("delayed")
    loss_of(model, 1, 0).backward()
    monkeypatch.setattr(histories, "is_capturing", lambda tensor: True)
    with pytest.raises(f8sub.Float8ConfigError, match="capture forward and backward alone"):
        optimizer.step()
