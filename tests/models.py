"""Small models of the shapes FSDP2 meets in practice, with weights that do not depend on the rank."""

import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils import _pytree as pytree

import f8sub
from tests.data_sets import gaussian, generator, spread_columns

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class FeedForward(nn.Module):
    """SwiGLU by the names of transformers' layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Choice(nn.Module):
    """Of two layers in one group, which the ranks do not both use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return self.layers[index](x)


class Block(nn.Module):
    """Pre-norm attention whose q, k, v share one x, then a gated MLP whose two inputs share another."""

    attention: Callable[..., torch.Tensor] = staticmethod(F.scaled_dot_product_attention)

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.o(self.attention(self.q(h), self.k(h), self.v(h)))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Blocks(nn.Module):
    """Blocks to be compiled or checkpointed one by one."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Transformer(Blocks):
    """Blocks and a head named ``lm_head``, which conversion leaves alone."""

    def __init__(self, width: int = 32, hidden: int = 48, blocks: int = 2, classes: int = 11) -> None:
        super().__init__(*(Block(width, hidden) for _ in range(blocks)))
        self.lm_head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(super().forward(x))


class Stack(nn.Module):
    """Linear layers without a bias, each a block of its own: every gathered byte is a weight's."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(fan_in, fan_out, bias=False) for fan_in, fan_out in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def seed_weights(model: nn.Module, spread: float = 0.0, seed: int = 0) -> nn.Module:
    """The same random parameters on every rank; the columns of matrices spread over ``e ** spread``."""
    rng = generator(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = gaussian(tuple(parameter.shape), rng)
            if parameter.dim() == 2:
                parameter.copy_(spread_columns(noise / parameter.shape[1] ** 0.5, spread))
            else:
                parameter.copy_(0.1 * noise + ("norm" in name and name.endswith("weight")))
    return model


def transformer(
    recipe: str | None, *, spread: float = 0.0, all_gather: bool = True, blocks: int = 2
) -> nn.Module:
    model = seed_weights(Transformer(blocks=blocks), spread)
    if recipe is None:
        return model
    return f8sub.convert_to_float8(model, recipe=recipe, float8_all_gather=all_gather)


def shard(model: nn.Module, policy: MixedPrecisionPolicy | None = None, **options: Any) -> nn.Module:
    """``fully_shard`` on each block, then on the root, as training scripts do."""
    policy = policy or MixedPrecisionPolicy()
    for block in getattr(model, "blocks", None) or model.layers:
        fully_shard(block, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def replicated(replicas: int) -> DeviceMesh:
    """All ranks: so many replicas, each sharded over as many ranks as there are; of one its shards alone."""
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return mesh if replicas > 1 else mesh["shard"]


def checkpointed(model: nn.Module) -> nn.Module:
    """Each block is computed again in backward."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return model


def float8_layers(model: nn.Module) -> list[f8sub.Float8Linear]:
    return [module for module in model.modules() if isinstance(module, f8sub.Float8Linear)]


def shard_of(layer: f8sub.Float8Linear) -> Any:
    """What is sent of a layer's weight."""
    return layer._f8sub.conversion.shard_of(layer._f8sub.conversion.record_of(layer, "weight"))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """A Transformer's loss on the tokens of one rank in one step."""
    rng = generator(10 * step + rank)
    x = gaussian((4, 4, 32), rng).to(next(model.parameters()).dtype)
    logits = model(x).flatten(0, 1).float()
    return F.cross_entropy(logits, torch.randint(11, (16,), generator=rng))


def take_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """Backward and step; the loss."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def precompute(model: nn.Module) -> None:
    """``precompute_scales`` of a model that may be the plain one beside a converted one."""
    if float8_layers(model):
        f8sub.precompute_scales(model)


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What ends a step: new weights, no gradients, and the scales of the new weights."""
    optimizer.step()
    optimizer.zero_grad()
    precompute(model)


def train(
    model, rank: int = 0, *, start=0, steps=3, microbatches=1, optimizer=None, around=nullcontext
) -> list[float]:
    """A Transformer's losses in every microbatch of a few steps, of AdamW where no optimizer is given.

    Each step from number ``start`` on has tokens of its own; ``around`` makes the context of each forward.
    """
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    precompute(model)
    for step in range(start, start + steps):
        for micro in range(microbatches):
            with around():
                loss = loss_of(model, microbatches * step + micro, rank)
            loss.backward()
            losses.append(loss.item())
        update(model, optimizer)
    return losses


def equal(found: Any, expected: Any) -> bool:
    """Whether two trees of tensors and values are the same, bitwise."""
    (leaves, tree), (others, other_tree) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    pairs = zip(leaves, others, strict=True)
    same = (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)
    return tree == other_tree and all(same)


def _forward_metadata_inference(step: Callable[[], object]) -> None:
    step()


def learning_shapes(step: Callable[[], object]) -> None:
    """Run ``step`` as a stage of torch's pipelines does before its first micro-batch, by torch's name for it."""
    importlib.import_module("torch.distributed.pipelining.stage")  # as who has a stage did
    _forward_metadata_inference(step)


@contextmanager
def silenced() -> Iterator[None]:
    """What f8sub warns of meanwhile is ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", f8sub.Float8Warning)
        yield


@contextmanager
def heard() -> Iterator[list[str]]:
    """What f8sub warns of meanwhile, each time; there after the ``with`` block."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    told += [str(warning.message) for warning in caught if warning.category is f8sub.Float8Warning]


def refusal(kind: type[Exception], call: Callable[..., Any], *args: Any) -> str:
    """The text of the error of that kind which the call ends with."""
    with pytest.raises(kind) as error:
        call(*args)
    return str(error.value)
