"""Each way of running FSDP2: the losses with the float8 all-gather are those without it, bit for bit."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import BF16, Transformer, checkpointed, float8_layers, loss_of, seed_weights, shard, update
from tests.selection import long_but
from tests.wire import ONE_RECIPE_A_WIRE, PER_LAYER, Wire

STEPS, MICROBATCHES = 2, 2
How = Callable[[nn.Module], nn.Module]
Result = tuple[list[float], list[int], set[bool]]


def with_options(**options) -> How:
    return lambda model: shard(model, **options)


def with_policy(**policy: torch.dtype) -> How:
    return lambda model: shard(model, MixedPrecisionPolicy(**policy))


def on_mesh(*shape: int) -> How:
    names = ("replicate", "shard")
    return lambda model: shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))


def on_two_meshes(model: nn.Module) -> nn.Module:
    """One block over all ranks, the other over pairs: two tables of scales."""
    flat = init_device_mesh("cpu", (4,))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.blocks[0], mesh=flat)
    fully_shard(model.blocks[1], mesh=pairs)
    return fully_shard(model, mesh=flat)


def prefetching(model: nn.Module) -> nn.Module:
    model = shard(model)
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    return model


def frozen_first_block(model: nn.Module) -> nn.Module:
    model.blocks[0].requires_grad_(False)
    return shard(model)


def matrices_by_columns(parameter: nn.Parameter) -> Shard:
    """The head's 11 classes included: 32 columns are even for 2 ranks, the only way Shard(1) goes."""
    return Shard(1) if parameter.dim() == 2 else Shard(0)


def ignored(model: nn.Module) -> nn.Module:
    """Weights that stay whole on every rank, cast there; nobody reduces their gradients, so they are frozen."""
    kept = [model.blocks[0].q.weight, model.blocks[1].down.weight]
    for parameter in kept:
        parameter.requires_grad_(False)
    return shard(model, ignored_params=set(kept))


def tied_in_one_group(model: nn.Module) -> nn.Module:
    """Two blocks are one group, in which two layers have one weight."""
    fully_shard(list(model.blocks))
    return fully_shard(model)


def selectively_checkpointed(model: nn.Module) -> nn.Module:
    """The products are kept, and all else is computed again."""

    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        kept = op in (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    return shard(model)


def unsharded_by_hand(model: nn.Module) -> nn.Module:
    """Gathered before forward, one of them without waiting, and kept between forward and backward."""
    model = shard(model)

    def gather(module: nn.Module, args: object) -> None:
        module.blocks[0].unshard(async_op=True)
        module.blocks[1].unshard()

    model.register_forward_pre_hook(gather)
    return model


def made_on_meta(model: nn.Module) -> nn.Module:
    """``to_empty``, and then the model's own init; ``model`` itself is on meta."""
    model = shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            nn.init.trunc_normal_(parameter, std=0.2)
        else:
            nn.init.constant_(parameter, float("norm" in name and name.endswith("weight")))
    return model


def over_whole_sequences(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of this rank's queries to all ranks' keys and values, each (batch, tokens, width)."""
    k, v = (all_gather_tensor_autograd(part.contiguous(), 1, dist.group.WORLD) for part in (k, v))
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def context_parallel(model: nn.Module) -> nn.Module:
    """Each rank has a part of each sequence; torch's own ``context_parallel`` has no attention for CPUs."""
    for block in model.blocks:
        block.attention = over_whole_sequences
    return shard(model)


MODES: dict[str, tuple[int, How]] = {
    "bf16": (2, with_options(policy=BF16)),
    "reduce-bf16": (2, with_policy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)),
    "reduce-fp32": (2, with_policy(reduce_dtype=torch.float32)),
    "fp16": (2, with_policy(param_dtype=torch.float16)),
    "reshard-never": (2, with_options(reshard_after_forward=False)),
    "kept-after-backward": (2, with_options(reshard_after_forward=False)),
    "root-alone": (2, functools.partial(fully_shard, mp_policy=BF16)),
    "hsdp": (4, on_mesh(2, 2)),
    "shards-of-one": (2, on_mesh(2, 1)),
    "two-meshes": (4, on_two_meshes),
    "columns": (2, with_options(shard_placement_fn=matrices_by_columns)),
    "uneven-and-empty": (5, with_options()),
    "checkpointed": (2, lambda model: shard(checkpointed(model))),
    "selectively-checkpointed": (2, selectively_checkpointed),
    "prefetching": (2, prefetching),
    "unsharded-by-hand": (2, unsharded_by_hand),
    "offloaded": (2, with_options(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "frozen": (2, frozen_first_block),
    "ignored": (2, ignored),
    "context-parallel": (2, context_parallel),
    "tied-in-one-group": (2, tied_in_one_group),
    "made-on-meta": (2, made_on_meta),
}
REDUCTIONS = {"two-meshes": 2, "shards-of-one": 0}
"""All-reduces of amaxes a step where there is not one."""


def model_of(recipe: str, mode: str, all_gather: bool) -> nn.Module:
    if mode == "made-on-meta":
        with torch.device("meta"):
            model = Transformer()
    else:
        # 16 rows on 5 ranks: the last one has none.
        model = seed_weights(Transformer(hidden=16 if mode == "uneven-and-empty" else 48), 2.0)
    if mode == "tied-in-one-group":
        model.blocks[1].o.weight = model.blocks[0].q.weight
    chosen = PER_LAYER if recipe == "per-layer" else recipe
    return f8sub.convert_to_float8(model, recipe=chosen, float8_all_gather=all_gather)


def train(model: nn.Module, rank: int, *, synchronized: bool = False, kept: bool = False) -> Result:
    """Losses of every microbatch and of an evaluation after each step.

    And the all-reduces of amaxes of each step, and whether layers had weights in the float8 format of their own recipe.
    Gradients are reduced at every microbatch if ``synchronized``; weights stay gathered between them if ``kept``.
    """
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses, reductions, in_float8 = [], [], set()

    def look(layer: nn.Module, args: object) -> None:
        gathered, format = layer.weight, layer._f8sub.plan.recipe.fprop.b
        in_float8.add(isinstance(gathered, f8sub.Float8Tensor) and gathered.rowwise.format == format)

    for layer in float8_layers(model):
        layer.register_forward_pre_hook(look)
    f8sub.precompute_scales(model)
    for step in range(STEPS):
        for micro in range(MICROBATCHES):
            last = micro == MICROBATCHES - 1
            model.set_requires_gradient_sync(synchronized or last)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last or not kept)
            loss = loss_of(model, MICROBATCHES * step + micro, rank)
            loss.backward()
            losses.append(loss.item())
        meshes = {parameter.device_mesh for parameter in optimizer.param_groups[0]["params"]}
        for mesh in meshes:  # gradient norms of two meshes cannot be stacked
            of_mesh = [p for p in model.parameters() if getattr(p, "device_mesh", None) == mesh]
            torch.nn.utils.clip_grad_norm_(of_mesh, 1.0)
        with Wire() as wire:
            update(model, optimizer)
        reductions.append(wire.all_reduces)
        with torch.no_grad():
            losses.append(model(gaussian((2, 4, 32), generator(step))).float().sum().item())
    return losses, reductions, in_float8


QUICK = [("tensorwise", mode) for mode in ("hsdp", "columns", "checkpointed")]
QUICK += [("mxfp8", "offloaded"), ("per-layer", "bf16"), ("delayed", "uneven-and-empty")]
CASES = [*QUICK, *(("tensorwise", mode) for mode in MODES)]
# Tables of rows and blocks differ from a table of one scale a weight where shards lie otherwise.
CASES += [(recipe, mode) for recipe in ("rowwise", "blockwise") for mode in ("columns", "uneven-and-empty")]
CASES += zip(ONE_RECIPE_A_WIRE[1:], ("bf16", "prefetching", "offloaded", "frozen"), strict=True)
CASES += [("delayed", mode) for mode in ("context-parallel", "two-meshes", "columns")]


@pytest.fixture
def world(mode):
    return MODES[mode][0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("recipe", "mode"), long_but(QUICK, dict.fromkeys(CASES)))
def test_on_is_off(rank, world, recipe, mode):
    """With one all-reduce of amaxes a step, which the high-precision all-gather needs for histories alone."""
    # Every other mode with gradients that are reduced at every microbatch.
    options = {"synchronized": list(MODES).index(mode) % 2 == 0, "kept": mode == "kept-after-backward"}
    models = (MODES[mode][1](model_of(recipe, mode, all_gather)) for all_gather in (True, False))
    (on, reductions, in_float8), (off, without, never) = (train(model, rank, **options) for model in models)
    assert on == off
    assert in_float8 == ({True, False} if mode == "ignored" else {True})
    assert never == {False}
    assert len(set(on)) == len(on)
    least = REDUCTIONS.get(mode, 1)
    assert reductions == [max(least, 1) if recipe == "delayed" else least] * STEPS
    assert without == (reductions if recipe == "delayed" else [0] * STEPS)


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("mxfp8", marks=pytest.mark.long)])
def test_resharding_to_a_part_is_refused_before_training(rank, world, recipe):
    """The refusal with the float8 all-gather; losses without it, resharded to pairs and to all."""
    models = (shard(model_of(recipe, "", False), reshard_after_forward=to) for to in (2, True))
    part, whole = (train(model, rank)[0] for model in models)
    assert part == whole
    model = shard(model_of(recipe, "", True), reshard_after_forward=2)
    with pytest.raises(f8sub.Float8ConfigError, match=r"blocks\.0.*reshard_after_forward"):
        model(torch.zeros(1, 4, 32))
