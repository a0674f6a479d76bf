"""Any shape, number of ranks, dtype and recipe: sharded is unsharded, bit for bit, and nothing is silently wrong."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import f8sub
from tests.data_sets import gaussian, generator

DTYPES = (torch.float32, torch.bfloat16)
SCALES = (1.0, 1e-38, 1e-30, 1e30, 0.0)
"""What the weights are multiplied by; subnormal and zero tensors among them."""

cases = st.fixed_dictionaries(
    {
        "recipe": st.sampled_from(f8sub.recipe_names()),
        "rows": st.integers(1, 9).map(lambda n: 16 * n),
        "cols": st.integers(1, 9).map(lambda n: 16 * n),
        "tokens": st.sampled_from((0, 1, 3, 16, 37)),
        "weight": st.sampled_from(DTYPES),
        "param": st.sampled_from(DTYPES),
        "bias": st.booleans(),
        "scale": st.sampled_from(SCALES),
        "all_gather": st.booleans(),
        "seed": st.integers(0, 2**16),
    }
)


def model_of(case: dict) -> nn.Module:
    model = nn.Sequential(nn.Linear(case["cols"], case["rows"], bias=case["bias"])).to(case["weight"])
    rng = generator(case["seed"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(gaussian(tuple(parameter.shape), rng) * case["scale"])
    return f8sub.convert_to_float8(model, recipe=case["recipe"], float8_all_gather=case["all_gather"])


def products(model: nn.Module, case: dict, dtype: torch.dtype) -> list[torch.Tensor]:
    """y and dx: what this rank computes without the others' gradients."""
    rng = generator(case["seed"] + 1)
    x = gaussian((case["tokens"], case["cols"]), rng).to(dtype).requires_grad_()
    y = model(x)
    y.backward(gaussian(tuple(y.shape), rng).to(y.dtype))
    return [y.detach(), x.grad]


def differences(rank: int, world: int, case: dict) -> list[str]:
    """Against the unsharded model whose weights were rounded to param_dtype, as FSDP2 rounds what it gathers."""
    torch.manual_seed(case["seed"])
    expected = products(model_of(case).to(case["param"]), case, case["param"])
    torch.manual_seed(case["seed"])
    model = model_of(case)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=case["param"], reduce_dtype=torch.float32))
    f8sub.precompute_scales(model)
    found = products(model, case, case["param"])
    names = [
        name
        for name, ours, right in zip(("y", "dx"), found, expected, strict=True)
        if ours.dtype != right.dtype or not torch.equal(ours, right) or not ours.isfinite().all()
    ]
    gradient = model[0].weight.grad
    is_right = gradient.dtype == case["weight"] and gradient.full_tensor().isfinite().all()
    return names if is_right else [*names, "dw"]


MORE = [pytest.param(*case, marks=pytest.mark.long) for case in ((1, 20), (3, 40), (7, 20))]


@pytest.mark.parametrize(("world", "examples"), [(2, 8), (3, 8), (5, 8), *MORE])
def test_sharded_is_unsharded(ranks, world, examples):
    """More rows than ranks and fewer, shards that are short and shards that are empty."""

    quietly = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

    @settings(max_examples=examples, derandomize=True, **quietly)
    @given(case=cases)
    def check(case):
        assert ranks(world, differences, case) == [[]] * world

    check()
