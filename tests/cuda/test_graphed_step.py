"""CUDA graphs of training: a whole step of weights that are not sharded, forward and backward under FSDP2."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import f8sub
from tests.compiling import compile_blocks
from tests.cuda.sharded import BATCH, CLASSES, WIDTH
from tests.data_sets import gaussian, generator
from tests.layers import RECIPES
from tests.models import BF16, precompute, shard, transformer, update

CURRENT = [recipe for recipe in RECIPES if f8sub.get_recipe(recipe).delayed is None]
STEPS = 5


class Batch:
    """Memory that each step's batch is copied to, on whatever stream, after all that was launched before."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.x = torch.zeros(BATCH, 4, WIDTH, dtype=dtype, device="cuda")
        self.target = torch.zeros(BATCH * 4, dtype=torch.int64, device="cuda")

    def feed(self, step: int) -> None:
        rng = generator(step)
        torch.cuda.synchronize()
        self.x.copy_(gaussian(tuple(self.x.shape), rng))
        self.target.copy_(torch.randint(CLASSES, (BATCH * 4,), generator=rng))
        torch.cuda.synchronize()

    def backward(self, model: nn.Module) -> torch.Tensor:
        loss = F.cross_entropy(model(self.x).flatten(0, 1).float(), self.target)
        loss.backward()
        return loss.detach()


def whole_steps(recipe: str, compiled: bool, graphed: bool) -> list[float]:
    """Losses of steps with AdamW and precompute_scales; all but the first two are replays where ``graphed``."""
    model, batch = transformer(recipe, spread=2.0).cuda().bfloat16(), Batch(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True, capturable=True)
    if compiled:
        torch._dynamo.reset()
        compile_blocks(model, "inductor")

    def run() -> torch.Tensor:
        loss = batch.backward(model)
        update(model, optimizer)
        return loss

    stream, losses = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for step in range(2):
            batch.feed(step)
            losses.append(run().item())
    graph = torch.cuda.CUDAGraph()
    if graphed:
        with torch.cuda.graph(graph, stream=stream):
            loss = run()
    for step in range(2, 2 + STEPS):
        batch.feed(step)
        if graphed:
            graph.replay()
        else:
            loss = run()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", CURRENT, ids=CURRENT)
def test_a_whole_step(recipe, compiled):
    launched = whole_steps(recipe, compiled, graphed=False)
    assert launched[-1] != launched[0]
    assert whole_steps(recipe, compiled, graphed=True) == launched


def sharded_steps(recipe: str | None, graphed: bool, gradients: bool = False) -> list[float]:
    """Losses where forward and backward are replays, all but the first two, and the rest of the step is launched.

    With ``gradients`` those are reduced in float8. The graph is captured right after ``precompute_scales``.
    """
    model, batch = shard(transformer(recipe, spread=2.0).cuda(), BF16), Batch()
    if gradients:
        f8sub.reduce_gradients_in_float8(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    graph, stream, losses = torch.cuda.CUDAGraph(), torch.cuda.Stream(), []
    precompute(model)
    for step in range(2 + STEPS):
        batch.feed(step)
        if step < 2 or not graphed:
            with torch.cuda.stream(stream):
                loss = batch.backward(model)
            torch.cuda.synchronize()
        else:
            if step == 2:
                # NCCL's watchdog queries events meanwhile, in a thread of its own.
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    loss = batch.backward(model)
            graph.replay()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        precompute(model)
    return losses


def sharded(rank: int, world: int, recipe: str, gradients: bool) -> tuple[list[float], list[float]] | str:
    """Losses with launches and with replays; or why FSDP2 itself cannot be captured."""
    try:
        sharded_steps(None, graphed=True)
    except RuntimeError as error:
        return f"FSDP2 of torch {torch.__version__} in bf16: {error}"
    return sharded_steps(recipe, False, gradients), sharded_steps(recipe, True, gradients)


two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize(
    ("world", "gradients"),
    [(1, False), pytest.param(2, False, marks=two), pytest.param(2, True, marks=two)],
    ids=["one", "two", "two-float8-gradients"],
)
@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)
def test_forward_and_backward_under_fsdp2(ranks, recipe, world, gradients):
    found = ranks(world, sharded, recipe, gradients, gpus=True, timeout=240)[0]
    if isinstance(found, str):
        pytest.skip(found)
    launched, replayed = found
    assert launched[-1] != launched[0]
    assert replayed == launched
