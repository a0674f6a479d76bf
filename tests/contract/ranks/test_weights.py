"""The contract of weights: however one was changed, the next forward uses what it is now, on all ranks alike.

Every weight, by every way it changes: a new kind of weight is a value of ``WEIGHTS``, a new way one of ``MUTATIONS``.
"""

import ctypes
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import f8sub
from tests.budgets import decibels
from tests.compiling import past_dispatch, whole
from tests.data_sets import gaussian, generator
from tests.models import Stack, seed_weights, shard, silenced
from tests.selection import long_but
from tests.wire import ONE_RECIPE_A_WIRE, QUICK, least_decibels, on_each

FATAL = 2.0  # an amax this much too small saturates: 23 dB at 2x, 10 dB at 4x
ROWS, COLUMNS = 96, 64
on_each_recipe = on_each(ONE_RECIPE_A_WIRE)

Mutation = Callable[[nn.Module, str], None]


def local(model: nn.Module) -> torch.Tensor:
    weight = model.layers[0].weight
    return weight.to_local() if hasattr(weight, "to_local") else weight


def new_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {"layers.0.weight": 20 * gaussian((ROWS, COLUMNS), generator(8))}


def optimizer_step(make: Callable[..., torch.optim.Optimizer], **options) -> Mutation:
    def mutate(model: nn.Module, folder: str) -> None:
        optimizer = make(model.parameters(), **options)
        optimizer.step()
        optimizer.zero_grad()

    return mutate


def within_a_closure(model: nn.Module, folder: str) -> None:
    """LBFGS runs the model between the changes of one step."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=3e3, max_iter=2, tolerance_change=0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs()).square().mean()
        loss.backward()
        return loss

    with silenced():
        optimizer.step(closure)
    optimizer.zero_grad()


def load_state_dict(model: nn.Module, folder: str) -> None:
    other = Stack(COLUMNS, ROWS)
    other.load_state_dict(new_weights(model))
    model.load_state_dict(shard(other).state_dict() if hasattr(model, "unshard") else other.state_dict())


def dcp_load(model: nn.Module, folder: str) -> None:
    other = Stack(COLUMNS, ROWS)
    other.load_state_dict(new_weights(model))
    dcp.save(shard(other).state_dict(), checkpoint_id=folder)
    # A plain model's checkpoint has none of the histories of delayed scaling.
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(model.state_dict(), checkpoint_id=folder, planner=planner)


def set_state_dict(model: nn.Module, folder: str) -> None:
    set_model_state_dict(model, new_weights(model), options=StateDictOptions(full_state_dict=True))


def without_gradients(change: Callable[[nn.Module], object]) -> Mutation:
    def mutate(model: nn.Module, folder: str) -> None:
        with torch.no_grad():
            change(model)

    return mutate


@torch.no_grad()
def through_views(model: nn.Module, folder: str) -> None:
    local(model)[1:].view(-1)[::3].mul_(-20.0)
    local(model).t()[5].fill_(9.0)


@torch.no_grad()
def initialized_again(model: nn.Module, folder: str) -> None:
    torch.manual_seed(4)
    nn.init.normal_(model.layers[0].weight, std=10.0)


class Writing(torch.optim.Optimizer):
    """Writes to this rank's parts of weights by a function of its own."""

    def __init__(self, parameters, write: Callable[[torch.Tensor], None]) -> None:
        super().__init__(parameters, {"write": write})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                group["write"](parameter.to_local() if hasattr(parameter, "to_local") else parameter)


def by_a_kernel(weight: torch.Tensor) -> None:
    """As CUDA kernels of optimizers in 8 bits do: no operator and no version counter shows it."""
    if count := weight.numel():
        memory = (ctypes.c_float * count).from_address(weight.data_ptr())
        memory[:] = [20.0 * value for value in memory]


def by_a_kernel_that_is_told(model: nn.Module, folder: str) -> None:
    """What docs/checkpoints_and_faults.md says to do, with the parameter, which FSDP2 has as a DTensor."""
    by_a_kernel(local(model))
    torch.autograd.graph.increment_version(model.layers[0].weight)


def bypassing_dispatch(weight: torch.Tensor) -> None:
    """Where no operator of the weight's shows it, as generated code does."""
    with torch._C._DisableTorchDispatch():
        torch.ops.aten.mul_.Scalar(weight, 20.0)


def compiled(
    of: Callable[[nn.Module], torch.Tensor], backend: str | Callable[..., object] = past_dispatch
) -> Mutation:
    """In-place operators on a parameter, a view of it or its local tensor, in compiled code."""

    @torch.no_grad()
    def scale(weight: torch.Tensor) -> None:
        weight.mul_(10.0).add_(weight, alpha=1.0)

    def mutate(model: nn.Module, folder: str) -> None:
        torch._dynamo.reset()
        torch.compile(scale, backend=backend)(of(model))

    return mutate


MUTATIONS: dict[str, Mutation] = {
    "adamw-loop": optimizer_step(torch.optim.AdamW, lr=3.0, foreach=False),
    "lbfgs": within_a_closure,
    "adamw-foreach": optimizer_step(torch.optim.AdamW, lr=3.0, foreach=True),
    "adamw-fused": optimizer_step(torch.optim.AdamW, lr=3.0, fused=True),
    "sgd": optimizer_step(torch.optim.SGD, lr=3e3),
    "kernel-of-its-own": optimizer_step(Writing, write=by_a_kernel),
    "kernel-and-version": by_a_kernel_that_is_told,
    "bypassing-dispatch": optimizer_step(Writing, write=bypassing_dispatch),
    "load_state_dict": load_state_dict,
    "set_model_state_dict": set_state_dict,
    "in-place": without_gradients(lambda model: model.layers[0].weight.mul_(20.0)),
    "state-dict": without_gradients(
        lambda model: torch._foreach_mul_([model.state_dict()["layers.0.weight"]], 20.0)
    ),
    "in-place-on-the-shard": without_gradients(lambda model: local(model).copy_(20 * local(model).flip(-1))),
    "views": through_views,
    "data": lambda model, folder: local(model).data.mul_(20.0),
    "old-alias": without_gradients(lambda model: model.alias.mul_(20.0)),  # from before anything was computed
    "init": initialized_again,
    "foreach": without_gradients(lambda model: torch._foreach_mul_([local(model)], 20.0)),
    "compiled-in-place": compiled(lambda model: model.layers[0].weight),
    "compiled-data": compiled(lambda model: model.layers[0].weight.data),
    "compiled-on-the-shard": compiled(lambda model: local(model).data),
}
THROUGH_OPERATORS = [*list(MUTATIONS)[list(MUTATIONS).index("load_state_dict") :], "wrapped-optimizer"]
THROUGH_OPERATORS = [name for name in THROUGH_OPERATORS if not name.startswith("compiled")]
"""What changes weights that are no memory, as primary ones; compiled code refuses to."""


def inputs() -> torch.Tensor:
    return gaussian((32, COLUMNS), generator(3))


def compiled_optimizer(model: nn.Module, folder: str) -> None:
    """torchao's 8-bit AdamW compiles its step with Inductor."""
    from torchao.optim import AdamW8bit

    torch._inductor.config.compile_threads = 1
    optimizer_step(AdamW8bit, lr=3.0)(model, folder)


def assign_data_then_write_to_it(model: nn.Module, folder: str) -> None:
    """The tensor assigned is a plain one: nothing shows that it was written to."""
    weight = gaussian((ROWS, COLUMNS), generator(8))
    model.layers[0].weight.data = weight
    model(inputs())
    weight.mul_(20.0)


def vector_to_parameters(model: nn.Module, folder: str) -> None:
    vector = new_weights(model)["layers.0.weight"].flatten()
    nn.utils.vector_to_parameters(vector, model.parameters())


def vector_to_parameters_then_write(model: nn.Module, folder: str) -> None:
    vector = gaussian((ROWS * COLUMNS,), generator(8))
    nn.utils.vector_to_parameters(vector, model.parameters())
    model(inputs())
    vector.mul_(20.0)


REBOUND: dict[str, Mutation] = {
    "assigned-data": lambda model, folder: setattr(
        model.layers[0].weight, "data", new_weights(model)["layers.0.weight"]
    ),
    "assigned-data-then-write": assign_data_then_write_to_it,
    "vector": vector_to_parameters,
    "vector-then-write": vector_to_parameters_then_write,
}
ALL = {
    "dcp.load": dcp_load,
    "compiled": compiled_optimizer,
    "inductor": compiled(lambda model: model.layers[0].weight, "inductor"),
    "inductor-data": compiled(lambda model: model.layers[0].weight.data, "inductor"),
    "wrapped-optimizer": lambda model, folder: model.optimizer.step(),
    **MUTATIONS,
    **REBOUND,
}


def master(recipe: str, sharded: bool) -> nn.Module:
    """A high-precision weight, of which codes are made."""
    model = f8sub.convert_to_float8(seed_weights(Stack(COLUMNS, ROWS)), recipe=recipe)
    return shard(model) if sharded else model


def primary(recipe: str, sharded: bool) -> nn.Module:
    """Codes alone, whose master an optimizer has."""
    model = f8sub.convert_to_float8(seed_weights(Stack(COLUMNS, ROWS)), recipe=recipe, primary_weights=True)
    model = shard(model) if sharded else model
    model.optimizer = f8sub.optim.MasterWeights(torch.optim.SGD(model.parameters(), lr=3e3))
    return model


WEIGHTS = {"master": master, "primary": primary}


def used(recipe: str, sharded: bool, weight: str = "master") -> nn.Module:
    """A model whose scales and codes were computed and used, with gradients in place."""
    model = WEIGHTS[weight](recipe, sharded)
    model.alias = local(model).detach()
    f8sub.precompute_scales(model)
    model(inputs()).square().mean().backward()
    return model


def after(
    mutation: str, folder: str, recipe: str, sharded: bool, precompute: bool, weight: str = "master"
) -> torch.Tensor:
    """y after the change; asserts that it is right, and that old scales would not have been."""
    model = used(recipe, sharded, weight)
    before = whole(model.layers[0].weight).clone()
    ALL[mutation](model, folder)
    growth = whole(model.layers[0].weight).abs().amax() / before.abs().amax()
    assert growth > FATAL, f"this change would not show: the amax grew by {growth:.2f}"
    with silenced():
        if precompute:
            f8sub.precompute_scales(model)
        y = model(inputs())
    found = decibels(inputs().double() @ whole(model.layers[0].weight).double().t(), y)
    assert found >= least_decibels(recipe), f"{found:.1f} dB, precompute_scales called: {precompute}"
    return y.detach()


def on_a_rank(rank, world, mutation: str, recipe: str, folder: str, weight: str = "master") -> list:
    return [after(mutation, f"{folder}/{p}", recipe, True, p, weight) for p in (False, True)]


def assert_alike(results: list[list[torch.Tensor]]) -> None:
    for ys in results:
        for y in ys:
            assert torch.equal(y, results[0][0])


def cases(of_master: Iterable[str], of_primary: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize ``weight``, ``recipe`` and ``mutation``: all with one scale, and a few with each other recipe.

    Recipes that are not ``QUICK`` are long.
    """
    few = ("adamw-foreach", "load_state_dict", "in-place-on-the-shard", "data", "vector")
    found = [("master", "tensorwise", mutation) for mutation in of_master]
    found += [("master", recipe, way) for recipe in ONE_RECIPE_A_WIRE[1:] for way in of_master if way in few]
    found += [("primary", "tensorwise", mutation) for mutation in of_primary]
    quick = [case for case in found if case[1] in QUICK]
    return pytest.mark.parametrize(("weight", "recipe", "mutation"), long_but(quick, found))


@cases([*MUTATIONS, "dcp.load"], [*THROUGH_OPERATORS, "dcp.load"])
def test_sharded(ranks, weight, recipe, mutation, tmp_path):
    assert_alike(ranks(2, on_a_rank, mutation, recipe, str(tmp_path), weight))


def test_sharded_over_one_rank(ranks, tmp_path):
    """There FSDP2 casts when the all-gather ends."""
    assert_alike(ranks(1, on_a_rank, "in-place", "tensorwise", str(tmp_path)))


def on_a_rank_of_many(rank: int, world: int, mutation: str, recipe: str, folder: str) -> list[torch.Tensor]:
    global ROWS
    ROWS = 16
    return on_a_rank(rank, world, mutation, recipe, folder)


# FSDP2 moves a short shard to a padded storage at the first forward, which older aliases do not see. LBFGS flattens
# gradients, which torch cannot do with uneven shards.
UNEVEN = ("adamw-foreach", "dcp.load", "load_state_dict", "in-place-on-the-shard", "kernel-of-its-own")
UNEVEN += ("set_model_state_dict", "state-dict", "views", "init")


@pytest.mark.parametrize("mutation", long_but(UNEVEN[:2], UNEVEN))
def test_sharded_with_a_rank_that_holds_nothing(ranks, mutation, tmp_path):
    """16 rows over 7 ranks: the last rank's shard is empty, and nothing is ever written to it."""
    assert_alike(ranks(7, on_a_rank_of_many, mutation, "rowwise", str(tmp_path)))


@cases([*MUTATIONS, *REBOUND], THROUGH_OPERATORS)
def test_unsharded(weight, recipe, mutation, tmp_path):
    after(mutation, str(tmp_path), recipe, sharded=False, precompute=False, weight=weight)


def compiled_unsharded(rank: int, world: int, recipe: str, folder: str) -> None:
    after("compiled", folder, recipe, sharded=False, precompute=False)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_inductor_writes_to_memory(ranks, recipe, tmp_path):
    assert_alike(ranks(2, on_a_rank, "inductor", recipe, str(tmp_path)))
    assert_alike(ranks(1, on_a_rank, "inductor-data", recipe, str(tmp_path)))


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_a_compiled_optimizer_step(ranks, recipe, tmp_path):
    assert_alike(ranks(2, on_a_rank, "compiled", recipe, str(tmp_path)))
    ranks(1, compiled_unsharded, recipe, str(tmp_path))


@pytest.mark.parametrize("world", [3, 5], ids=["world3", "world5"])
@on_each_recipe
def test_a_state_dict_loaded_into_uneven_shards(rank, world, recipe):
    """FSDP2 pads a short shard into new memory, on some ranks alone; of 16 rows the fifth rank has none.

    Without precompute_scales the reduction is made in the first layer's gather, so that the second one's amaxes are new
    when its codes are not.
    """
    widths = (32, 16, 64, 32)
    loaded = {name: 20 * value for name, value in seed_weights(Stack(*widths), seed=8).state_dict().items()}
    model = f8sub.convert_to_float8(seed_weights(Stack(*widths)), recipe=recipe)
    fully_shard(model)
    x = gaussian((4, widths[0]), generator(3))
    model(x).backward(gaussian((4, widths[-1]), generator(4)))
    set_model_state_dict(model, dict(loaded), options=StateDictOptions(full_state_dict=True))
    alone = f8sub.convert_to_float8(Stack(*widths), recipe=recipe)
    alone.load_state_dict(loaded)
    with torch.no_grad(), silenced():
        assert torch.equal(model(x), alone(x))
