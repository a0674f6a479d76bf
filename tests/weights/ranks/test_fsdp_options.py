"""What else FSDP2 can be asked for: losses with the float8 all-gather are those without it, bit for bit."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import f8sub
from tests.models import BF16, Transformer, loss_of, seed_weights, shard, transformer
from tests.selection import long_but

STEPS, MICROBATCHES = 2, 2
How = Callable[[nn.Module], nn.Module]


def with_options(**options) -> How:
    return lambda model: shard(model, **options)


def with_policy(**policy: torch.dtype) -> How:
    return lambda model: shard(model, MixedPrecisionPolicy(**policy))


def on_mesh(*shape: int) -> How:
    return lambda model: shard(
        model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    )


def matrices_by_columns(parameter: nn.Parameter) -> Shard:
    """The head's 11 classes included: 32 columns are even for 2 ranks, the only way Shard(1) goes."""
    return Shard(1) if parameter.dim() == 2 else Shard(0)


def ignored(model: nn.Module) -> nn.Module:
    """Weights that stay whole on every rank, cast there; nobody reduces their gradients, so they are frozen."""
    kept = [model.blocks[0].q.weight, model.blocks[1].down.weight]
    for parameter in kept:
        parameter.requires_grad_(False)
    return shard(model, ignored_params=set(kept))


def tied(model: nn.Module) -> nn.Module:
    """One weight of two layers, in one group."""
    fully_shard(list(model.blocks))
    return fully_shard(model)


def selectively_checkpointed(model: nn.Module) -> nn.Module:
    """The products are kept, and all else is computed again."""

    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        kept = op in (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(
            forward,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
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


OPTIONS: dict[str, tuple[int, How]] = {
    "reduce-bf16": (2, with_policy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)),
    "reduce-fp32": (2, with_policy(reduce_dtype=torch.float32)),
    "fp16": (2, with_policy(param_dtype=torch.float16)),
    "hsdp": (4, on_mesh(2, 2)),
    "shards-of-one": (2, on_mesh(2, 1)),
    "columns": (2, with_options(shard_placement_fn=matrices_by_columns)),
    "uneven-and-empty": (5, with_options()),
    "ignored": (2, ignored),
    "tied": (2, tied),
    "selectively-checkpointed": (2, selectively_checkpointed),
    "unsharded-by-hand": (2, unsharded_by_hand),
    "kept-after-backward": (2, with_options(reshard_after_forward=False)),
    "made-on-meta": (2, made_on_meta),
}


def model_of(recipe: str, option: str, all_gather: bool) -> nn.Module:
    if option == "made-on-meta":
        with torch.device("meta"):
            model = Transformer()
    else:
        # 16 rows on 5 ranks: the last one has none.
        model = seed_weights(Transformer(hidden=16 if option == "uneven-and-empty" else 48), 2.0)
    if option == "tied":
        model.blocks[1].o.weight = model.blocks[0].q.weight
    return f8sub.convert_to_float8(model, recipe=recipe, float8_all_gather=all_gather)


def train(model: nn.Module, rank: int, *, synchronized: bool = True, kept: bool = False) -> list[float]:
    """Losses of every microbatch.

    Args:
        model: sharded.
        rank: which tokens it is given.
        synchronized: gradients are reduced at every microbatch, not at the last alone.
        kept: weights stay gathered from one microbatch to the next.
    """
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    f8sub.precompute_scales(model)
    for step in range(STEPS):
        for micro in range(MICROBATCHES):
            last = micro == MICROBATCHES - 1
            model.set_requires_gradient_sync(synchronized or last)
            model.set_reshard_after_backward(last or not kept)
            loss = loss_of(model, MICROBATCHES * step + micro, rank)
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
    return losses


def on_and_off(rank: int, world: int, recipe: str, option: str) -> list[list[float]]:
    # Every other option with gradients that are reduced once a step.
    synchronized = list(OPTIONS).index(option) % 2 == 0
    how, kept = OPTIONS[option][1], option == "kept-after-backward"
    return [
        train(how(model_of(recipe, option, all_gather)), rank, synchronized=synchronized, kept=kept)
        for all_gather in (True, False)
    ]


# Tables of rows and blocks differ from a table of one scale a weight where shards lie otherwise.
LONG = ("reduce-fp32", "fp16", "shards-of-one", "kept-after-backward")
CASES = [("tensorwise", option) for option in OPTIONS if option not in LONG] + [
    ("rowwise", "uneven-and-empty")
]
MORE = [("tensorwise", option) for option in LONG]
MORE += [("rowwise", option) for option in ("hsdp", "columns", "fp16")]
MORE += [("blockwise", option) for option in ("columns", "uneven-and-empty")]
MORE += [("delayed", option) for option in ("hsdp", "columns", "uneven-and-empty", "ignored", "made-on-meta")]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("recipe", "option"), long_but(CASES, CASES + MORE))
def test_on_is_off(ranks, recipe, option):
    for on, off in ranks(OPTIONS[option][0], on_and_off, recipe, option):
        assert on == off
        assert len(set(on)) == len(on)


def checkpointed_and_compiled(rank: int, world: int, recipe: str) -> list[list[float]]:
    """Each block checkpointed: eager, compiled within its checkpoint, compiled around it."""
    arms = []
    for compiled in ("no", "within", "around"):
        torch._dynamo.reset()
        model = transformer(recipe, spread=2.0)
        for index, block in enumerate(model.blocks):
            if compiled == "around":
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            if compiled != "no":
                block.compile(backend="aot_eager", fullgraph=True)
            if compiled != "around":
                model.blocks[index] = checkpoint_wrapper(block)
        arms.append(train(shard(model, BF16), rank))
    return arms


@pytest.mark.long
def test_checkpointed_and_compiled(ranks):
    for eager, within, around in ranks(2, checkpointed_and_compiled, "delayed"):
        assert within == eager
        assert around == eager


def resharded_to_pairs(rank: int, world: int, recipe: str) -> tuple[str, list[float], list[float]]:
    """The refusal with the float8 all-gather; losses without it, resharded to pairs and to all."""
    arms = []
    for pair in (2, True):
        model = shard(model_of(recipe, "", False), reshard_after_forward=pair)
        arms.append(train(model, rank))
    model = shard(model_of(recipe, "", True), reshard_after_forward=2)
    with pytest.raises(f8sub.Float8ConfigError) as refusal:
        model(torch.zeros(1, 4, 32))
    return str(refusal.value), *arms


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("mxfp8", marks=pytest.mark.long)])
def test_resharding_to_a_part_is_refused_before_training(ranks, recipe):
    for refusal, part, whole in ranks(4, resharded_to_pairs, recipe):
        assert "blocks.0" in refusal
        assert "reshard_after_forward" in refusal
        assert part == whole
