"""Linear layers and experts under FSDP2: what names a weight names those of both."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import f8sub
from tests.contract.test_twins import FORMS, results, x_of
from tests.models import equal, refusal, silenced


@pytest.mark.parametrize("name", FORMS)
def test_sharded(rank, world, name):
    form = FORMS[name]
    model = form.converted("rowwise")
    expected = results(form.converted("rowwise"))
    fully_shard(model)
    f8sub.precompute_scales(model)
    with f8sub.find_nonfinite(model) as search, f8sub.Monitor(model, every=1) as watch:
        y, dx, *gradients = results(model)
    watch.flush()
    assert search.first is None
    assert {row.layer for row in watch.rows} == form.rows
    assert equal([y, dx, *(g.full_tensor() for g in gradients)], expected)
    weight = model.layer._parameters[form.weights[-1]]
    if rank == world - 1:
        with torch.no_grad():
            weight.to_local().view(-1)[0] = torch.nan
    with f8sub.find_nonfinite(model) as search:
        model(x_of())
    fqn = "layer" if form.is_linear else f"layer.{form.weights[-1]}"
    assert str(search) == f"w of {fqn} on rank {world - 1}"
    with silenced():  # that a weight changed on one rank alone
        message = refusal(
            f8sub.Float8NumericsError, lambda: [f8sub.precompute_scales(model) for _ in range(2)]
        )
    assert fqn in message
