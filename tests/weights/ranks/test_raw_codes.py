"""Codes without their scales that are written to sharded weights: refused on every rank, and nothing changes."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import f8sub
from tests.contract.test_twins import FORMS, x_of
from tests.models import refusal, silenced
from tests.weights.test_raw_codes import WRITES, codes_of


@pytest.mark.parametrize("primary", [False, True], ids=["master", "primary"])
@pytest.mark.parametrize("name", ["linear", "grouped_linear", "transposed"])
def test_writes_to_sharded_weights_are_refused(rank, world, name, primary):
    form = FORMS[name]
    model, attribute = form.converted("tensorwise", primary_weights=primary), form.weights[-1]
    fully_shard(model)
    if primary:
        f8sub.optim.MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    f8sub.precompute_scales(model)
    before = model(x_of()).detach()
    model.reshard()
    fqn = "layer" if form.is_linear else f"layer.{attribute}"
    # DTensor has no _foreach_copy_, and communicates rows, which gloo does with no float8.
    for way in WRITES.keys() - {"rows", "item", "foreach"}:
        weight = getattr(model.layer, attribute)
        whole = codes_of(weight, torch.float8_e4m3fn)
        codes = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
        with torch.no_grad():
            message = refusal(f8sub.Float8ConfigError, WRITES[way], model.layer, attribute, codes)
        assert fqn in message, way
        assert "torch.float8_e4m3fn" in message
        assert isinstance(getattr(model.layer, attribute), DTensor)
    local = getattr(model.layer, attribute).to_local()
    with torch.no_grad():
        message = refusal(f8sub.Float8ConfigError, local.copy_, codes.to_local())
    assert fqn in message
    # A state dict of a sharded model holds the weights themselves: what dcp.load does with codes.
    saved = model.state_dict()[f"layer.{attribute}"]
    message = refusal(f8sub.Float8ConfigError, saved.copy_, codes)
    assert fqn in message
    with silenced():
        assert torch.equal(model(x_of()).detach(), before)


@pytest.mark.parametrize("name", ["linear", "grouped_linear"])
def test_a_shard_that_became_codes_is_refused_before_it_is_cast(rank, world, name):
    form = FORMS[name]
    model, attribute = form.converted("tensorwise").requires_grad_(False), form.weights[-1]
    fully_shard(model)
    f8sub.precompute_scales(model)
    local = getattr(model.layer, attribute)._local_tensor
    local.data = codes_of(local, torch.float8_e4m3fn)
    message = refusal(f8sub.Float8ConfigError, f8sub.precompute_scales, model)
    fqn = "layer" if form.is_linear else f"layer.{attribute}"
    assert message.startswith(f"{fqn}: its weight gets torch.float8_e4m3fn")
