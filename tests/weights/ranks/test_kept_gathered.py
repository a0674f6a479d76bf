"""What FSDP2 keeps gathered, or was gathering, stays as it was when its shards and their scales change.

FSDP2 gathers such a weight again after it was resharded, in high precision too. So a forward in between multiplies by
the weights from before the change. Float8 data from before it with scales from after it are no weight at all.
"""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.fsdp import FSDPModule, fully_shard

import f8sub
from tests.compiling import compile_blocks, mlps
from tests.data_sets import gaussian, generator
from tests.experts.ranks.test_experts_sharded import batch, converted, sharded
from tests.models import BF16, Transformer, equal, replicated, seed_weights, shard, silenced
from tests.selection import long_but
from tests.wire import QUICK

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4", "gridquant", "delayed")
EXPERTS = 3
Values = dict[str, torch.Tensor]


def modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    for module in modules(model):
        module.reshard()


def gathered(model: nn.Module) -> Values:
    """The float8 weights that FSDP2 has gathered."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: w.dequantize().clone() for name, w in found.items() if isinstance(w, f8sub.Float8Tensor)}


def gathered_now(model: nn.Module) -> Values:
    reshard(model)
    with silenced():  # of scales that nobody computed after a change
        for module in modules(model):
            module.unshard()
    found = gathered(model)
    reshard(model)
    return found


class Change(torch.optim.Optimizer):
    """Gives every shard other values, whose codes are others too, and a larger amax."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                local = parameter.to_local()
                local.copy_(20 * local.flip(-1) + local)


def inputs(model: nn.Module) -> tuple[torch.Tensor, ...]:
    return batch(EXPERTS, 0) if hasattr(model, "experts") else (gaussian((2, 4, 32), generator(3)),)


def pass_of(model: nn.Module) -> None:
    y = model(*inputs(model))
    y.backward(gaussian(tuple(y.shape), generator(4)).to(y.dtype))


def not_resharded(model: nn.Module) -> list:
    model.set_reshard_after_backward(False)
    pass_of(model)
    return []


def evaluated(model: nn.Module) -> list:
    """FSDP2 keeps the root, of whose weights a Transformer has the head's."""
    pass_of(model)
    with torch.no_grad():
        model(*inputs(model))
    return []


def unsharded(model: nn.Module) -> list:
    pass_of(model)
    for module in modules(model):
        module.unshard()
    return []


def on_their_way(model: nn.Module) -> list:
    pass_of(model)
    return [module.unshard(async_op=True) for module in modules(model)]


WAYS: dict[str, Callable[[nn.Module], list]] = {
    "set_reshard_after_backward": not_resharded,
    "evaluation": evaluated,
    "unshard": unsharded,
    "async": on_their_way,
}


def with_head(recipe: str) -> nn.Module:
    return f8sub.convert_to_float8(seed_weights(Transformer(classes=32)), recipe=recipe, skip_defaults=False)


def change(model: nn.Module, way: str, calls: int) -> tuple[Values, Values, list[str]]:
    """What is gathered before and after a change, and what f8sub warned of."""
    optimizer = Change(model.parameters())
    f8sub.precompute_scales(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", f8sub.Float8Warning)
        handles = WAYS[way](model)
        before = gathered(model)
        optimizer.step()
        # The second call ends the first one's reduction, which else the next all-gather does.
        for _ in range(calls):
            f8sub.precompute_scales(model)
        for handle in handles:
            handle.wait()
        if way == "evaluation":
            with torch.no_grad():
                model(*inputs(model))  # the blocks are gathered again, and end the reduction
    found = [str(each.message) for each in caught if issubclass(each.category, f8sub.Float8Warning)]
    return before, gathered(model), found


def held_by(model: nn.Module, way: str, calls: int) -> None:
    old = gathered_now(model)
    before, after, said = change(model, way, calls)
    assert after
    assert equal(list(after.values()), [old[name] for name in after])
    assert before.keys() <= after.keys()
    if way != "async":
        assert sum("while FSDP2 has it gathered" in text for text in said) == 1
    # The next all-gather has the new weights, as those of a model that is loaded with them.
    now = gathered_now(model)
    values = {name: p.full_tensor() for name, p in model.named_parameters()}
    for name, value in now.items():
        assert not torch.equal(value, old[name])
        error = (value.float() - values[name].float()).norm() / values[name].float().norm()
        assert error < 0.2, name


CASES = [(recipe, way) for recipe in RECIPES for way in WAYS]
FEW = [(recipe, way) for recipe, way in CASES if recipe in QUICK and way in ("evaluation", "async")]


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize(
    ("recipe", "way"), long_but([*FEW, ("tensorwise", "set_reshard_after_backward")], CASES)
)
def test_what_is_gathered_stays_as_it_was(rank, world, recipe, way, calls):
    held_by(shard(with_head(recipe), BF16), way, calls)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_next_all_gather_is_that_of_a_model_that_resharded(rank, world, recipe, way):
    model, other = (shard(with_head(recipe)) for _ in range(2))
    change(model, way, 2)
    f8sub.precompute_scales(other)
    pass_of(other)
    Change(other.parameters()).step()
    f8sub.precompute_scales(other)
    assert equal(list(gathered_now(model).values()), list(gathered_now(other).values()))


@pytest.mark.parametrize("way", ["set_reshard_after_backward", "evaluation", "unshard"])
def test_high_precision_multiplies_by_the_weights_from_before_the_step(rank, world, way):
    """FSDP2 alone: what it has gathered it does not gather again."""
    model = shard(seed_weights(Transformer(classes=32)))
    optimizer = Change(model.parameters())
    WAYS[way](model)
    before = [parameter.detach().clone() for parameter in model.lm_head.parameters()]
    optimizer.step()
    found = []
    model.lm_head.register_forward_pre_hook(
        lambda head, args: found.extend(p.detach().clone() for p in head.parameters())
    )
    with torch.no_grad():
        model(*inputs(model))
    assert equal(found, before)


@pytest.mark.parametrize("world", [1], ids=["world1"])
@pytest.mark.parametrize("way", ["evaluation", "unshard"])
def test_one_rank_casts_when_it_waits_for_the_all_gather(rank, world, way):
    held_by(shard(with_head("tensorwise")), way, 2)


@pytest.mark.parametrize("world", [4], ids=["world4"])
@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4"])
def test_replicas(rank, world, recipe):
    held_by(shard(with_head(recipe), mesh=replicated(2)), "evaluation", 2)


def test_a_step_by_which_torch_makes_states_for_a_state_dict_is_none(rank, world):
    """No warning: it steps at a rate of 0."""
    model = shard(with_head("tensorwise"))
    optimizer = torch.optim.AdamW(model.parameters())
    f8sub.precompute_scales(model)
    WAYS["evaluation"](model)
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error", f8sub.Float8Warning)
        _init_optim_state(optimizer)
    assert optimizer.state


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))


def test_tied_weights(rank, world):
    held_by(fully_shard(f8sub.convert_to_float8(seed_weights(Tied()), recipe="tensorwise")), "evaluation", 2)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_experts(rank, world, recipe, way):
    held_by(sharded(converted(EXPERTS, recipe)), way, 2)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_backward_multiplies_by_the_weights_of_its_forward(rank, world, compiled):
    """With ``reshard_after_forward=False``: nothing is gathered between the two."""
    found = []
    for changes in (False, True):
        model = f8sub.convert_to_float8(mlps(None, 2), recipe="rowwise")
        model = shard(compile_blocks(model) if compiled else model, reshard_after_forward=False)
        parameters = list(model.parameters())
        f8sub.precompute_scales(model)
        y = model(gaussian((2, 4, 32), generator(rank)).requires_grad_())
        if changes:
            Change(parameters).step()
            f8sub.precompute_scales(model)
            f8sub.precompute_scales(model)
        y.backward(gaussian(tuple(y.shape), generator(4)))
        found.append([parameter.grad.full_tensor() for parameter in parameters])
    assert equal(*found)
