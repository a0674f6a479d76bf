"""Sequence parallelism: x crosses the wire as float8, and is the x that one rank would have quantized."""

import functools
import math
import os
import shutil
import tempfile
from collections import OrderedDict
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import f8sub
from f8sub.tensor_parallel import Float8ColwiseParallel, PrepareFloat8ModuleInput
from tests.budgets import decibels
from tests.models import update
from tests.selection import long_but
from tests.tensor_parallel.models import (
    BATCH,
    OF_TOKENS,
    ONE_GATHER,
    PLANS,
    TOKENS,
    WIDTH,
    Parts,
    feed_forward,
    inputs,
    mesh_of,
    products_of,
    whole_gradients,
)
from tests.wire import Wire, on_each

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
on_each_recipe = on_each(RECIPES)
SENT = ("one gather a layer", "one gather", "high precision")
"""Plans that are given each rank's tokens."""
SPREAD = [*(("tensorwise", plan, (2,)) for plan in SENT), ("mxfp8", "one gather", (2, 2))]
MORE = [*(("rowwise", plan, (4,)) for plan in SENT), *(("blockwise", plan, (2,)) for plan in SENT[:2])]
MORE += [("rowwise", "one gather", (2, 2)), ("mxfp8", "one gather a layer", (4,))]


def parallel(recipe: str, plan: str, mesh: DeviceMesh) -> nn.Module:
    model = parallelize_module(feed_forward(recipe), mesh["tp"], PLANS[plan])
    return fully_shard(model, mesh=mesh["dp"]) if mesh.ndim > 1 else model


def products(rank, world, recipe: str, plan: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Of this rank's tokens; all data-parallel ranks are given the same batch."""
    mesh = mesh_of(*shape)
    degree, place = mesh["tp"].size(), mesh["tp"].get_local_rank()
    of_rank = (t.tensor_split(degree, dim=1)[place] for t in inputs())
    return products_of(parallel(recipe, plan, mesh), *of_rank)


def parts_of(recipe: str | dict[str, str], degree: int) -> nn.Module:
    """What each rank multiplies, on this one."""
    return f8sub.convert_to_float8(nn.Sequential(Parts(feed_forward(None)[0], degree)), recipe=recipe)


def check(found: list[dict[str, torch.Tensor]], recipe: str, *, sent_in_float8: bool) -> None:
    """Bitwise those of the ranks' parts: but for sums of float32 over four, and columns of x that came as rows."""
    degree = len(found)
    expected = whole_gradients(products_of(parts_of(recipe, degree), *inputs()))
    least = dict.fromkeys(expected, math.inf) | {"dx": 125}
    if degree > 2:
        least["y"] = 125
    row, col = f8sub.get_recipe(recipe).formats("x")
    if sent_in_float8 and not row.tile.is_transpose_of(col.tile):
        least |= {"0.w1.weight": 100, "0.w3.weight": 100}
    for name, right in expected.items():
        parts = [of_rank[name] for of_rank in found]
        whole = torch.cat(parts, 1) if name in ("y", "dx") else parts[0]
        assert decibels(right, whole) >= least[name], name


@pytest.mark.parametrize(("recipe", "plan", "shape"), long_but(SPREAD, SPREAD + MORE))
def test_products_are_those_of_the_ranks_parts(ranks, recipe, plan, shape):
    found = ranks(math.prod(shape), products, recipe, plan, shape)
    for start in range(0, len(found), shape[-1]):
        check(found[start : start + shape[-1]], recipe, sent_in_float8=plan != "high precision")


@pytest.mark.parametrize("tokens", [11, 1])
@pytest.mark.parametrize("plan", ["one gather a layer", "one gather"])
@on_each_recipe
def test_uneven_tokens(rank, world, recipe, plan, tokens):
    """Of 11 tokens rank 0 has 6 and rank 1 has 5; of 1 token rank 1 has none."""
    mesh = mesh_of(world)
    model = parallel(recipe, plan, mesh)
    x, dy = (t[:, :tokens] for t in inputs())
    expected = whole_gradients(products_of(parts_of(recipe, world), x, dy))
    x, dy = (distribute_tensor(t.contiguous(), mesh, [OF_TOKENS]) for t in (x, dy))
    y = model(x.requires_grad_())
    y.backward(dy.to_local())
    shape, stride = dy.shape, dy.stride()
    y = DTensor.from_local(y.detach() + 0, mesh, [OF_TOKENS], run_check=False, shape=shape, stride=stride)
    found = {"y": y, "dx": x.grad} | {name: parameter.grad for name, parameter in model.named_parameters()}
    assert [name for name, t in found.items() if decibels(expected[name], t.full_tensor()) < 85] == []


@pytest.mark.parametrize("plan", ["one gather a layer", "one gather"])
def test_a_context_in_high_precision_gathers_x_in_high_precision(rank, world, plan):
    model, x = parallel("tensorwise", plan, mesh_of(world)), inputs()[0]
    with f8sub.autocast(enabled=False):
        y = model(x.tensor_split(world, dim=1)[rank])
    expected = feed_forward(None)(x).tensor_split(world, dim=1)[rank]
    assert decibels(expected.detach(), y.detach() + 0) > 125


def test_one_style_serves_blocks_of_different_recipes(rank, world):
    recipe = {"a": "rowwise", "b": "tensorwise"}
    plan = {f"*.{name}".removesuffix("."): style for name, style in ONE_GATHER.items()}
    blocks = [feed_forward(None)[0] for _ in range(2)]
    parts = [Parts(block, world) for block in blocks]
    named = (OrderedDict(zip("ab", each, strict=True)) for each in (parts, blocks))
    whole, model = (f8sub.convert_to_float8(nn.Sequential(each), recipe=recipe) for each in named)
    parallelize_module(model, mesh_of(world)["tp"], plan)
    x = inputs()[0]
    y = model(x.tensor_split(world, dim=1)[rank])
    assert decibels(whole(x).tensor_split(world, dim=1)[rank].detach(), y.detach() + 0) > 85


@pytest.mark.parametrize("plan", SENT)
@on_each_recipe
def test_x_is_gathered_once_as_one_byte_an_element(rank, world, recipe, plan):
    """All-gathers and reduce-scatters of a forward and backward, and bytes that forward's all-gathers bring."""
    model = parallel(recipe, plan, mesh_of(world))
    x, dy = (t.tensor_split(world, dim=1)[rank] for t in inputs())
    x = x.clone().requires_grad_()
    with Wire() as wire:
        y = model(x)
        bytes_in = wire.output_bytes["all_gather_into_tensor"]
        gathers = wire.calls["all_gather_into_tensor"]
        y.backward(dy)
    scales = {"tensorwise": 0, "rowwise": 4, "blockwise": 4, "mxfp8": 2}[recipe]
    a_token = 4 * WIDTH if plan == "high precision" else WIDTH + scales
    of_siblings = 1 if plan == "one gather" else 2
    assert (gathers, wire.calls["reduce_scatter_tensor"]) == (of_siblings, of_siblings + 1)
    assert bytes_in == of_siblings * BATCH * TOKENS * a_token


@pytest.mark.parametrize(
    ("mode", "plan", "recipe", "world"),
    long_but(
        [("checkpointed", "one gather", "rowwise", 2)],
        [
            *(("compiled from outside", "one gather", recipe, 2) for recipe in RECIPES),
            *(("compiled from outside", "one gather", recipe, 4) for recipe in ("tensorwise", "rowwise")),
            ("checkpointed", "one gather", "rowwise", 2),
            ("compiled", "one gather", "rowwise", 4),
            *(("compiled", "one gather a layer", recipe, 2) for recipe in ("rowwise", "delayed")),
            *(("compiled", "one gather a layer", recipe, 4) for recipe in RECIPES),
            *(("compiled", "high precision", "rowwise", world) for world in (2, 4)),
            ("compiled", "high precision", "tensorwise", 4),
        ],
    ),
)
def test_each_mode_is_the_eager_run(rank, world, mode, plan, recipe):
    shape = (2,) if world == 2 else (2, 2)
    x, dy = (t.tensor_split(2, dim=1)[rank % 2] for t in inputs())
    usual = products_of(parallel(recipe, plan, mesh_of(*shape)), x, dy)
    model = parallel(recipe, plan, mesh_of(*shape))
    if mode == "compiled":
        # A shared x has the hook of a module that is compiled by itself run between graphs, and amax histories layers.
        fullgraph = plan != "one gather" and recipe != "delayed"
        model[0].compile(backend="aot_eager", fullgraph=fullgraph)
    elif mode == "compiled from outside":
        model.compile(backend="aot_eager", fullgraph=True)
    else:
        model[0].forward = functools.partial(checkpoint, model[0].forward, use_reentrant=False)
    found = products_of(model, x, dy)
    with torch.no_grad():
        found["y without gradients"] = model(x) + 0
    usual["y without gradients"] = usual["y"]
    assert [name for name in usual if not torch.equal(usual[name], found[name])] == []


class OfAPart(nn.Module):
    """Layers that are given all tokens, of which each rank keeps its part: a constant of compiled code."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: DTensor) -> torch.Tensor:
        part: torch.Tensor = self.layers(x.redistribute(placements=[Shard(1)]).to_local())
        return part


@pytest.mark.long
@pytest.mark.own_ranks
def test_code_on_disk_is_not_the_code_of_another_rank(rank, world):
    """As it may be of DTensors in high precision: findings/compiled_dtensors_run_the_code_of_another_rank.sh."""
    mesh = mesh_of(world)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    torch.distributed.broadcast_object_list(folder)
    x, dy = inputs()
    x, dy = distribute_tensor(x, mesh, [Replicate()]), dy.tensor_split(world, dim=1)[rank]
    found = []
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder[0]):
        for _ in range(2):  # the second finds what both ranks wrote
            torch._dynamo.reset()
            model = OfAPart(feed_forward("rowwise"))
            y = torch.compile(model, dynamic=False)(x)
            y.backward(dy)
            found.append([y.detach(), *(p.grad for p in model.parameters())])
            torch.distributed.barrier()
    assert all(map(torch.equal, *found))
    assert decibels(found[1][0], OfAPart(feed_forward("rowwise"))(x)) > 40
    if rank == 0:
        shutil.rmtree(folder[0])


def nodes_of(model: nn.Module, world: int, rank: int, *names: str, whole: bool = False) -> list[list[int]]:
    """How many nodes of each name the graph of forward has, and that of backward: of the model's part, or of it all."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    nodes = []

    def seen(graph, inputs):
        targets = [str(node.target) for node in graph.graph.nodes]
        nodes.append([sum(name in target for target in targets) for name in names])
        return make_boxed_func(graph.forward)

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=seen, bw_compiler=seen, partition_fn=partition)
    (model if whole else model[0]).compile(backend=backend, fullgraph=True)
    products_of(model, *(t.tensor_split(world, dim=1)[rank] for t in inputs()))
    return nodes


def test_what_compiled_code_must_not_look_into_is_one_node_each(rank, world):
    """Of layers that are given float8: products, and columns that backward derives of three w and two x."""
    model = feed_forward("tensorwise", backend="reference")
    parallelize_module(model, mesh_of(world)["tp"], PLANS["one gather a layer"])
    assert nodes_of(model, world, rank, "gemm_nt.", "derive_columnwise.") == [[3, 0], [6, 5]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "reduced"), long_but([("rowwise", 1)], [("rowwise", 1), ("tensorwise", 4)])
)
def test_compiled_code_gathers_an_x_of_two_layers_once(rank, world, recipe, reduced):
    """In one graph: the gather, what is reduced in forward and backward, and amaxes, of x and of w that ranks share."""
    model = parallel(recipe, "one gather", mesh_of(world))
    names = "all_gather_into_tensor.", "reduce_scatter_tensor.", "all_reduce."
    (gathers, scattered, of_amaxes), (again, of_dx, _) = nodes_of(model, world, rank, *names, whole=True)
    assert (gathers, scattered) == (1, 1)
    # dy of the last layer, and dx of both others.
    assert (again, of_dx) == (1, 1)
    assert of_amaxes == reduced


def test_a_hook_that_has_a_graph_of_its_own_is_no_part_of_a_whole_one(rank, world):
    """Before anything is multiplied: its x would leave that graph, and backward would fail."""
    model = parallel("rowwise", "one gather", mesh_of(world))
    model[0].compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        model(inputs()[0].tensor_split(world, dim=1)[rank])


@pytest.mark.parametrize("world", long_but((2,), (2, 4)))
def test_a_checkpointed_function_reduces_no_amax_again(rank, world):
    """Two ranks reduce those of w, four gather w with its scales. The function keeps the results of mm alone."""
    mesh = mesh_of(2) if world == 2 else mesh_of(2, 2)
    model = parallel("tensorwise", "high precision", mesh)
    kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    whole = model[0].forward
    model[0].forward = lambda x: checkpoint(whole, x, use_reentrant=False, context_fn=kept)
    of_w = 3 if world == 2 else 0
    assert nodes_of(model, 2, rank % 2, "all_reduce.") == [[of_w], [0]]


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_blocks_of_a_kind_are_compiled_once(rank, world):
    """Four ranks gather weights as float8. Blocks 0 and 2 are of one recipe, 1 and 3 of another."""
    plan = {name.replace("0", "*"): style for name, style in PLANS["high precision"].items()}
    recipes = {"[02]*": "tensorwise", "[13]*": "rowwise"}
    model = f8sub.convert_to_float8(nn.Sequential(*(feed_forward(None)[0] for _ in range(4))), recipe=recipes)
    mesh = mesh_of(2) if world == 2 else mesh_of(2, 2)
    parallelize_module(model, mesh["tp"], plan)
    x, dy = (t.tensor_split(2, dim=1)[rank % 2] for t in inputs())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
        if world == 4:
            fully_shard(block, mesh=mesh["dp"])
    for block in model:
        block(x).backward(dy)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def delayed_steps(rank: int, world: int, how: str) -> list[torch.Tensor]:
    """Histories and scales of every layer after three steps; of an unsharded model where ``how`` says so."""
    recipe = f8sub.get_recipe("delayed", amax_history_len=4)
    model = f8sub.convert_to_float8(feed_forward(None), recipe=recipe)
    tokens = slice(None)
    if how != "unsharded":
        mesh = mesh_of(2, 2) if world == 4 else mesh_of(2)
        plan = PLANS["one gather a layer" if how == "sequence parallel" else "whole tokens"]
        parallelize_module(model, mesh["tp"], plan)
        if world == 4:
            fully_shard(model, mesh=mesh["dp"])
        if how == "sequence parallel":
            place = mesh["tp"].get_local_rank()
            tokens = slice(place * TOKENS // 2, (place + 1) * TOKENS // 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the first gradients have scales of parts
    f8sub.precompute_scales(model)
    for step in range(3):
        x, dy = ((1.0 + step) * t[:, tokens] for t in inputs())
        model(x.requires_grad_()).backward(dy)
        update(model, optimizer)
    model[0].w3._f8sub.conversion.settle()
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("world", [2, 4], ids=["alone", "with fully_shard"])
@pytest.mark.parametrize("how", ["tensor parallel", "sequence parallel"])
def test_amax_histories_are_the_unsharded_model_s(ranks, how, world):
    expected = delayed_steps(0, 1, "unsharded")
    for found in ranks(world, delayed_steps, how):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


def test_what_cannot_be_sent_is_told_before_training(rank, world):
    mesh = mesh_of(world)["tp"]
    colwise = {"0.w3": Float8ColwiseParallel(input_layouts=OF_TOKENS)}
    layouts = {"input_layouts": OF_TOKENS, "desired_input_layouts": Replicate()}
    prepare = {"0": PrepareFloat8ModuleInput(**layouts)}
    in_e5m2 = {"0": PrepareFloat8ModuleInput(**layouts, float8_dtype=torch.float8_e5m2)}
    two = f8sub.convert_to_float8(feed_forward(None), recipe={"0.w1": "rowwise", "*": "tensorwise"})
    for model, plan, told in (
        (feed_forward(None), {"0.w3": Float8ColwiseParallel()}, "Float8ColwiseParallel.*got Linear"),
        (feed_forward(None), prepare, "PrepareFloat8ModuleInput.*no converted layers"),
        (feed_forward("rowwise_with_gw_hp"), colwise, r"0\.w3.*reads x in high precision"),
        (feed_forward("gridquant"), colwise, r"0\.w3.*several tokens"),
        (feed_forward("nvfp4"), colwise, r"0\.w3.*two elements in a byte"),
        (two, prepare, r"0\.w1.*fwd_config_submodule_fqn"),
        (feed_forward("tensorwise"), in_e5m2, r"0\..*float8_e5m2"),
        (feed_forward("delayed"), prepare, r"0\..*own past"),
    ):
        with pytest.raises(f8sub.Float8ConfigError, match=told):
            parallelize_module(model, mesh, plan)


def test_torch_s_styles_of_delayed_scaling_are_told_of(rank, world):
    """One takes the histories' list for a linear layer, the other distributes what is in it."""
    mesh, x = mesh_of(world)["tp"], inputs()[0]
    with pytest.raises(AttributeError, match=r"(?s)0\.w2.*Float8RowwiseParallel"):
        parallelize_module(feed_forward("delayed"), mesh, {"0.w2": RowwiseParallel()})
    model = parallelize_module(feed_forward("delayed"), mesh, {"0.w1": ColwiseParallel()})
    with pytest.raises(f8sub.Float8ConfigError, match=r"0\.w1.*Float8ColwiseParallel"):
        model(x)


def test_a_sibling_whose_wgrad_reads_x_in_high_precision_dequantizes_what_was_gathered(ranks):
    recipes = {"0.w1": "rowwise_with_gw_hp", "*": "rowwise"}
    expected = products_of(feed_forward(recipes), *inputs())
    for found in ranks(2, products, recipes, "one gather", (2,)):
        for name in ("0.w1.weight", "0.w3.weight"):
            assert decibels(expected[name], found[name]) > 25
