"""graph_step on GPUs: losses and weights of replays are those of launched steps, bitwise."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import f8sub
from f8sub.graphs import recorded
from f8sub.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel
from tests.compiling import compile_blocks
from tests.cuda.sharded import BATCH, CLASSES, WIDTH
from tests.data_sets import gaussian, generator
from tests.layers import RECIPES
from tests.models import BF16, shard, transformer

STEPS = 12
Batch = tuple[torch.Tensor, torch.Tensor]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def batch_of(step: int, rank: int = 0, size: int = BATCH) -> Batch:
    """On the host, where a step takes it from."""
    rng = generator(100 * step + rank)
    return gaussian((size, 4, WIDTH), rng).pin_memory(), torch.randint(CLASSES, (4 * size,), generator=rng)


def function_of(model: nn.Module, micro_batches: int = 1, clip: bool = True) -> Callable[..., torch.Tensor]:
    def forward_backward(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=x.device)
        parts = zip(x.chunk(micro_batches), target.chunk(micro_batches), strict=True)
        for index, (some, targets) in enumerate(parts):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(index == micro_batches - 1)
            loss = F.cross_entropy(model(some).flatten(0, 1).float(), targets) / micro_batches
            loss.backward()
            total += loss.detach()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return total

    return forward_backward


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 3e-3, "fused": True, **options})


class Run:
    """Steps of one model; ``found`` are losses, and ``weights`` the parameters after the last one."""

    def __init__(self, model: nn.Module, launched: bool, rank: int = 0, **how: Any) -> None:
        self.model, self.rank = model, rank
        self.start = copy.deepcopy(model.state_dict())
        self.optimizer = how.pop("optimizer", None) or adamw(model)
        function = how.pop("function", None) or function_of(model)
        options = {"warmup": 10**6} if launched else {}
        self.step = f8sub.graph_step(function, model, self.optimizer, **options, **how)
        self.losses: list[float] = []
        self.how: list[str] = []

    def go(self, steps: int = STEPS, before: Callable[[int], None] | None = None, size: int = BATCH) -> "Run":
        for _ in range(steps):
            index = len(self.losses)
            if before is not None:
                before(index)
            self.losses.append(self.step(*batch_of(index, self.rank, size)).item())
            self.how.append(self.step.how)
        return self

    def restore(self) -> nn.Module:
        """The model as it was at the start: code that is compiled anew may sum in another order."""
        self.model.load_state_dict(self.start)
        return self.model

    @property
    def weights(self) -> list[torch.Tensor]:
        tensors = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.model.parameters()]
        return [tensor.detach().clone() for tensor in tensors]


def assert_alike(
    replayed: Run, launched: Run, weights: list[torch.Tensor] | None = None, replays: int = STEPS - 4
) -> None:
    assert launched.losses[-1] != launched.losses[0]
    assert set(launched.how) == {"launched"}
    assert replayed.how.count("replayed") == replays, (replayed.how, replayed.step.why_launched)
    assert replayed.losses == launched.losses
    for one, other in zip(replayed.weights, weights or launched.weights, strict=True):
        assert torch.equal(one, other)


def on_gpu(recipe: str | None, compiled: bool = False) -> nn.Module:
    model = transformer(recipe, spread=2.0).cuda()
    if compiled:
        torch._dynamo.reset()
        compile_blocks(model, "inductor")
    return model


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_on_one_gpu(recipe, compiled):
    launched = Run(on_gpu(recipe, compiled), launched=True).go()
    weights, model = launched.weights, launched.restore()
    if compiled:
        again = Run(model, launched=True).go()
        same = all(torch.equal(*pair) for pair in zip(again.weights, weights, strict=True))
        if again.losses != launched.losses or not same:
            pytest.skip("launched steps of this compiled code differ among themselves")
    launched.restore()
    assert_alike(Run(model, launched=False).go(), launched, weights)


def sharded_model(rank: int, world: int, recipe: str | None, kind: str) -> nn.Module:
    model = transformer(recipe, spread=2.0).cuda()
    if kind == "compiled":
        torch._dynamo.reset()
        compile_blocks(model, "inductor")
    if kind.startswith("checkpointed"):
        for block in model.blocks:
            own, preserves = block.forward, kind == "checkpointed"
            block.forward = functools.partial(
                checkpoint, own, use_reentrant=False, preserve_rng_state=preserves
            )
    if kind == "tensor-parallel":
        styles = {name: Float8ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
        styles |= {name: Float8RowwiseParallel() for name in ("o", "down")}
        tensor_mesh = init_device_mesh("cuda", (1, world), mesh_dim_names=("shard", "parts"))
        for block in model.blocks:
            parallelize_module(block, tensor_mesh["parts"], styles)
        return shard(model, BF16, mesh=tensor_mesh["shard"])
    if kind == "ddp":
        with torch.cuda.stream(torch.cuda.Stream()):
            return DistributedDataParallel(model, device_ids=[rank])
    mesh = {}
    if kind == "hsdp":
        mesh["mesh"] = init_device_mesh("cuda", (world, 1), mesh_dim_names=("replicate", "shard"))
    shard(model, BF16, **mesh)
    if kind == "gradients":
        f8sub.reduce_gradients_in_float8(model)
    return model


def sharded(rank: int, world: int, recipe: str | None, kind: str) -> None:
    steps, micro_batches = STEPS + 8 if kind == "ddp" else STEPS, 2 if kind == "micro-batches" else 1

    def run(model: nn.Module, launched: bool) -> Run:
        # Ranks that share layers read one batch; and torch's clipping takes parameters of one mesh.
        is_parallel = kind == "tensor-parallel"
        function = function_of(model, micro_batches, clip=not is_parallel)
        return Run(model, launched, 0 if is_parallel else rank, function=function).go(steps)

    launched = run(sharded_model(rank, world, recipe, kind), True)
    weights, model = launched.weights, launched.restore()
    replayed = run(model if kind == "compiled" else sharded_model(rank, world, recipe, kind), False)
    assert_alike(replayed, launched, weights)
    replayed.step.close()


KINDS = (
    *(
        "eager",
        "compiled",
        "checkpointed",
        "checkpointed-without-rng",
        "gradients",
        "micro-batches",
        "hsdp",
        "ddp",
        "tensor-parallel",
    ),
)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=two)])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_of_sharded_weights(ranks, world, recipe):
    ranks(world, sharded, recipe, "eager", gpus=True, timeout=240)


@two
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "delayed"])
def test_of_each_kind(ranks, recipe, kind):
    ranks(2, sharded, recipe, kind, gpus=True, timeout=240)


def fused(rank: int, world: int, recipe: str | None, kind: str) -> None:
    def run(launched: bool) -> Run:
        model = transformer(None, spread=2.0).to(torch.bfloat16 if kind == "masters" else torch.float32)
        if recipe is not None:
            f8sub.convert_to_float8(model, recipe=recipe)
        mesh = {}
        if kind == "hsdp":
            mesh["mesh"] = init_device_mesh("cuda", (world, 1), mesh_dim_names=("replicate", "shard"))
        shard(model.cuda(), BF16, **mesh)
        optimizer: Any = adamw(model)
        if kind == "masters":
            optimizer = f8sub.optim.MasterWeights(optimizer)
        fused = f8sub.optim.fuse_step(optimizer)
        usual = function_of(model, micro_batches=2 if kind == "micro-batches" else 1, clip=False)

        def forward_backward(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            loss = usual(x.to(model.lm_head.weight.dtype), target)
            fused.clip_grad_norm_(1.0)
            return loss

        def change(step: int) -> None:
            assert fused.why_torch is None
            optimizer.param_groups[0]["lr"] = 3e-3 / (1 + step)
            if step == STEPS - 3:
                with torch.no_grad():
                    model.blocks[0].q.weight.mul_(3.0)

        made = Run(model, launched, rank, optimizer=optimizer, function=forward_backward)
        return made.go(before=change)

    launched, replayed = run(True), run(False)
    assert_alike(replayed, launched)
    assert replayed.step.why_optimizer_launched is None
    replayed.step.close()


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=two)])
@pytest.mark.parametrize("kind", ["fused", "masters", "micro-batches", "hsdp"])
@pytest.mark.parametrize("recipe", [None, "tensorwise", "blockwise", "delayed"])
def test_of_a_fused_step(ranks, world, recipe, kind):
    """Clipped, stepped and with scales by one pass, at rates and of weights that change between steps."""
    ranks(world, fused, recipe, kind, gpus=True, timeout=240)


def test_a_rate_that_changes():
    def run(launched: bool) -> Run:
        made = Run(on_gpu("tensorwise"), launched)
        schedule = torch.optim.lr_scheduler.LambdaLR(made.optimizer, lambda step: 1.0 / (1 + step))
        return made.go(before=lambda step: schedule.step())

    assert_alike(run(False), run(True))


def test_weights_that_are_changed_between_steps_are_read():
    """In place, by loading, and by another optimizer: no replay reads what was before."""

    def run(launched: bool) -> Run:
        model = on_gpu("tensorwise")
        made, saved = Run(model, launched), copy.deepcopy(model.state_dict())
        other = torch.optim.SGD(model.parameters(), lr=0.0, weight_decay=0.1)

        def change(step: int) -> None:
            with torch.no_grad():
                if step == 6:
                    for parameter in model.parameters():
                        parameter.mul_(1.5)
                elif step == 7:
                    model.load_state_dict(saved)
                elif step == 8:
                    for parameter in model.parameters():
                        parameter.grad = torch.ones_like(parameter)
                    for group in other.param_groups:
                        group["lr"] = 1e-2
                    other.step()
                elif step == 9:
                    f8sub.precompute_scales(model)

        return made.go(before=change)

    assert_alike(run(False), run(True))


def test_evaluation_between_steps():
    def run(launched: bool) -> tuple[Run, list[float]]:
        model, evaluated = on_gpu("delayed"), []
        made = Run(model, launched)

        def evaluate(step: int) -> None:
            model.eval()
            with torch.no_grad():
                evaluated.append(model(batch_of(1000 + step)[0].cuda()).sum().item())
            model.train()

        return made.go(before=evaluate), evaluated

    (replayed, found), (launched, expected) = run(False), run(True)
    assert_alike(replayed, launched)
    assert found == expected


def test_an_optimizer_state_that_is_loaded():
    def run(launched: bool) -> Run:
        made = Run(on_gpu("tensorwise"), launched)
        states: list[dict[str, Any]] = []

        def change(step: int) -> None:
            if step == 4:
                states.append(copy.deepcopy(made.optimizer.state_dict()))
            if step == 7:
                made.optimizer.load_state_dict(states[0])

        return made.go(before=change)

    replayed = run(False)
    assert_alike(replayed, run(True), replays=STEPS - 4 - 4)
    assert replayed.how[7] == "launched"


def test_an_optimizer_that_is_launched():
    def run(launched: bool) -> Run:
        model = on_gpu("tensorwise")
        return Run(model, launched, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).go()

    replayed = run(False)
    assert_alike(replayed, run(True))
    assert "SGD steps by the host" in replayed.step.why_optimizer_launched


@pytest.mark.parametrize("other", ["launch", "capture"])
def test_batches_of_two_shapes(other):
    def run(launched: bool) -> Run:
        made = Run(on_gpu("tensorwise"), launched, other_batches=other)
        for size in (BATCH, 4) * 3:
            made.go(4, size=size)
        return made

    replayed = run(False)
    assert_alike(replayed, run(True), replays=8 if other == "launch" else 8 + 10)


def test_what_waits_for_the_gpu_is_named_and_launched():
    model = on_gpu("tensorwise")
    inner = function_of(model)

    def waits(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = inner(x, target)
        found.item()
        return found

    made = Run(model, launched=False, function=waits)
    with pytest.warns(f8sub.Float8Warning, match=r"test_graph_step\.py:\d+ waits for the GPU"):
        made.go(6)
    assert made.how == ["launched"] * 6
    assert made.losses == Run(on_gpu("tensorwise"), launched=True).go(6).losses


class OnlyCaptures:
    """Does what a capture refuses and nothing warns of."""

    def __call__(self, x: torch.Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("not in a graph")


def failing(rank: int, world: int, place: str) -> None:
    model = transformer("tensorwise", spread=2.0).cuda()
    if world > 1:
        shard(model, BF16)
    refuses = OnlyCaptures()
    if place == "forward":
        model.blocks[1].down.register_forward_pre_hook(lambda module, args: refuses(args[0]))
    elif place == "backward":
        model.blocks[0].register_full_backward_pre_hook(lambda module, grads: refuses(grads[0]))
    made = Run(model, False, rank)
    if place == "optimizer":
        made.optimizer.register_step_pre_hook(lambda *_: refuses(torch.zeros(1)))
    with pytest.warns(f8sub.Float8Warning, match="not in a graph"):
        made.go(8)
    twin = transformer("tensorwise", spread=2.0).cuda()
    if world > 1:
        shard(twin, BF16)
    launched = Run(twin, True, rank).go(8)
    assert made.losses == launched.losses
    assert made.how[-1] == ("replayed" if place == "optimizer" else "launched")
    made.step.close()


@pytest.mark.parametrize("place", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=two)])
def test_a_capture_that_fails_leaves_the_model_trainable(ranks, world, place):
    ranks(world, failing, place, gpus=True, timeout=120)


def test_dropout():
    def run(launched: bool) -> Run:
        torch.manual_seed(0)
        model = on_gpu("tensorwise")
        model.lm_head = nn.Sequential(nn.Dropout(0.5), model.lm_head)
        return Run(model, launched).go()

    assert_alike(run(False), run(True))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_nan_is_told(recipe):
    """Of weights, by the call after the next one and by each later one: the host is one step ahead."""

    for launched in (False, True):
        model = on_gpu(recipe)
        made = Run(model, launched).go(6)
        with torch.no_grad():
            model.blocks[0].q.weight[0, 0] = torch.nan
        made.go(1)
        for _ in range(3):
            with pytest.raises(f8sub.Float8NumericsError, match=r"blocks\.0\.q"):
                made.go(1)
        made.restore()
        for state in made.optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
        made.go(3)
        assert made.how[-3:] == ["launched"] * 3 if launched else ["launched", "replayed", "replayed"]


def test_a_monitor_samples_launched_steps():
    model = on_gpu("tensorwise")
    monitor, made = f8sub.Monitor(model, every=5), Run(model, launched=False)
    for _ in range(STEPS):
        with monitor:
            made.go(1)
    monitor.flush()
    assert {row.step for row in monitor.rows} == {0, 5, 10}
    assert [made.how[step] for step in (5, 10)] == ["launched"] * 2
    assert made.how.count("replayed") >= 5
    assert made.losses == Run(on_gpu("tensorwise"), launched=True).go().losses


def memory(rank: int, world: int) -> tuple[int, ...]:
    """Reserved bytes of launched steps, of replays, and the most of a launched step beside a graph without memory."""
    found = []
    for launched in (True, False):
        torch.cuda.empty_cache()
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(16)))
        f8sub.convert_to_float8(model.cuda())
        for block in model:
            fully_shard(block, mp_policy=BF16)
        fully_shard(model, mp_policy=BF16)
        optimizer = adamw(model)

        def function(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            loss = model(x).float().square().mean()
            loss.backward()
            return loss

        step = f8sub.graph_step(function, model, optimizer, warmup=10**6 if launched else 3)
        x = torch.randn(4096, 4096, device="cuda")
        for _ in range(8):
            step(x)
        torch.cuda.synchronize()
        found.append(torch.cuda.memory_reserved())
        if not launched:
            torch.cuda.reset_peak_memory_stats()
            with pytest.MonkeyPatch.context() as patch, f8sub.Monitor(model, every=1):
                there = recorded.memory_of
                patch.setattr(recorded, "memory_of", lambda device, there=there: (0, *there(device)[1:]))
                step(x)
            assert step.how == "launched"
            assert "the graph was freed" in step.why_launched
            found.append(torch.cuda.max_memory_reserved())
        step.close()
        del step, model, optimizer, function
    return tuple(found)


def test_memory(ranks):
    launched, replayed, beside = ranks(1, memory, gpus=True, timeout=120)[0]
    assert replayed <= 1.03 * launched
    # At its beginning there is the graph; a launched step beside it would need half as much again.
    assert beside <= 1.1 * replayed
