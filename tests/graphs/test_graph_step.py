"""graph_step on a CPU, by an imitation of graphs: replays are launched steps. tests/cuda has real graphs."""

import contextlib
import copy
import functools
import gc
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import f8sub
from f8sub.graphs import dependencies, optimizers, recorded
from f8sub.weights.conversion import Conversion
from tests.data_sets import gaussian, generator
from tests.graphs.tape import Tape, imitate
from tests.layers import RECIPES
from tests.models import BF16, checkpointed, seed_weights, shard, transformer
from tests.selection import long_but
from tests.tensor_parallel.models import PLANS, WIDTH, FeedForward

STEPS = 6


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate(monkeypatch)


small = functools.partial(transformer, blocks=1)
"""Seven float8 layers, which share inputs in threes and twos."""


def batch_of(step: int, rank: int = 0, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    rng = generator(10 * step + rank)
    return gaussian((size, 4, 32), rng), torch.randint(11, (4 * size,), generator=rng)


def forward_backward_of(model: nn.Module, clip: float | None = 1.0) -> Callable[..., torch.Tensor]:
    def forward_backward(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), target)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        return loss

    return forward_backward


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 3e-3, "fused": True, **options})


def trained(
    recipe: str | None, steps: int = STEPS, *, between: Callable[..., None] | None = None, blocks: int = 1
) -> tuple[list[float], nn.Module, Any]:
    """Losses of so many steps, the model, and the step; ``between`` is called after each."""
    model = transformer(recipe, spread=2.0, blocks=blocks)
    optimizer = adamw(model)
    step = f8sub.graph_step(forward_backward_of(model), model, optimizer)
    losses = []
    for index in range(steps):
        losses.append(step(*batch_of(index)).item())
        if between is not None:
            between(index, model, optimizer)
    return losses, model, step


def both(monkeypatch: pytest.MonkeyPatch, recipe: str | None, **how: Any) -> Any:
    """Launched losses and weights are those of replays; the last step."""
    launched, twin, _ = trained(recipe, **how)
    with monkeypatch.context() as patch:
        imitate(patch)
        replayed, model, step = trained(recipe, **how)
    assert launched[-1] != launched[0]
    assert replayed == launched
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
    return step


@pytest.mark.parametrize(
    "recipe", long_but((None, "blockwise", "mxfp8", "nvfp4", "delayed"), [None, *RECIPES])
)
def test_losses_and_weights_are_those_of_launched_steps(monkeypatch, recipe):
    step = both(monkeypatch, recipe, blocks=2)
    assert (step.how, step.why_launched) == ("replayed", None)


def sharded(
    rank: int, world: int, recipe: str | None, gradients: bool
) -> tuple[list[float], list[float], list[str]]:
    def train(imitated: bool) -> tuple[list[float], list[str]]:
        with pytest.MonkeyPatch.context() as patch:
            model = shard(transformer(recipe, spread=2.0), BF16)
            if gradients:
                f8sub.reduce_gradients_in_float8(model)
            if imitated:
                imitate(patch)
            step = f8sub.graph_step(forward_backward_of(model), model, adamw(model))
            found, how = [], []
            for index in range(STEPS):
                found.append(step(*batch_of(index, rank)).item())
                how.append(step.how)
            return found, how

    launched, replayed = train(False), train(True)
    return launched[0], *replayed


@pytest.mark.parametrize(
    ("world", "recipe", "gradients"),
    long_but(
        [(3, "tensorwise", True), (2, "delayed", False)],
        itertools.product((1, 2, 3), (None, *RECIPES), (False, True)),
    ),
)
def test_of_sharded_weights_too(ranks, world, recipe, gradients):
    for launched, replayed, how in ranks(world, sharded, recipe, gradients):
        assert how == ["launched"] * 3 + ["captured"] + ["replayed"] * (STEPS - 4)
        assert launched[-1] != launched[0]
        assert replayed == launched


def evaluated_between(rank: int, world: int) -> tuple[list[float], list[float], list[str]]:
    def train(evaluates: bool) -> list[float]:
        model = shard(small("tensorwise"), BF16)
        step, losses = f8sub.graph_step(forward_backward_of(model), model, adamw(model)), []
        for index in range(3):
            losses.append(step(*batch_of(index, rank)).item())
            if evaluates:
                with torch.no_grad():
                    model.eval()(batch_of(index, rank)[0])
                model.train()
        return losses

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return (
            train(False),
            train(True),
            [str(w.message) for w in caught if w.category is f8sub.Float8Warning],
        )


def test_an_evaluation_after_any_step_changes_nothing_and_asks_for_no_scales(ranks):
    """Users of ``graph_step`` are told not to call ``precompute_scales``."""
    for without, losses, warned in ranks(2, evaluated_between):
        assert losses == without
        assert warned == []


def evaluated_between_replays(rank: int, world: int) -> tuple[list[float], list[float], str]:
    def train(evaluates: bool) -> tuple[list[float], str]:
        model = shard(small("tensorwise"), BF16)
        step, losses = f8sub.graph_step(forward_backward_of(model), model, adamw(model)), []
        for index in range(STEPS):
            losses.append(step(*batch_of(index, rank)).item())
            if evaluates:
                with torch.no_grad():
                    model(batch_of(index, rank)[0])
        return losses, step.how

    with pytest.MonkeyPatch.context() as patch:
        imitate(patch)
        return train(False)[0], *train(True)


def test_an_evaluation_between_replays_has_nothing_captured_again(ranks):
    """It leaves the root's parameters gathered."""
    for without, losses, how in ranks(2, evaluated_between_replays):
        assert (losses, how) == (without, "replayed")


def python_calls_of_a_replay(rank: int, world: int, recipe: str | None, blocks: int) -> int:
    """Functions of Python that a call of a replayed step runs, but for the imitation's."""
    calls = 0

    def counted(frame: Any, event: str, given: Any) -> None:
        nonlocal calls
        calls += event == "call"

    model = shard(transformer(recipe, blocks=blocks), BF16)
    with pytest.MonkeyPatch.context() as patch:
        imitate(patch)
        # Where another test of these ranks had histories, the steps of each weight are counted.
        patch.setattr(Conversion, "counts_steps", False)
        step = step_of(model)
        assert hows(step, 6) == ["l", "l", "l", "c", "r", "r"]
        patch.setattr(Tape, "replay", nothing)
        gc.collect()  # else finalizers may run in between
        sys.setprofile(counted)
        step(*batch_of(6))
        sys.setprofile(None)
    assert step.how == "replayed"
    return calls


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_a_replay_calls_no_python_for_each_module_or_parameter(ranks, recipe):
    """All that is compared before one and noted after it is walked by loops of functions that are not Python's."""
    few, many = (ranks(1, python_calls_of_a_replay, recipe, blocks)[0] for blocks in (1, 3))
    assert few == many < 400


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> f8sub.GraphedStep:
    return f8sub.graph_step(forward_backward_of(model), model, optimizer or adamw(model), **options)


def hows(step: f8sub.GraphedStep, count: int, first: int = 0, size: int = 4) -> list[str]:
    found = []
    for index in range(first, first + count):
        step(*batch_of(index, size=size))
        found.append(step.how[0])
    return found


def test_on_a_cpu_every_step_is_launched():
    step = step_of(small("rowwise"))
    assert hows(step, 5) == ["l"] * 5
    assert step.why_launched == "there are no graphs on the cpu"


def test_a_model_is_looked_at_when_the_first_step_begins(imitated):
    with torch.device("meta"):
        model = small("rowwise")
    step = f8sub.graph_step(forward_backward_of(model), model)
    model.to_empty(device="cpu")
    seed_weights(model)
    assert hows(step, 5) == ["l", "l", "l", "c", "r"]


@pytest.mark.parametrize(("recipe", "launched"), [("rowwise", 1), ("delayed", 2)])
def test_delayed_scaling_is_launched_twice(imitated, recipe, launched):
    """Compiled code is compiled again for its first scales, which a capture cannot hold."""
    step = step_of(small(recipe), warmup=1)
    assert hows(step, 4) == [*"llcrr"[2 - launched :]][:4]


def scaled(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def loaded(model: nn.Module) -> None:
    """Histories too, that have no scales yet."""
    model.load_state_dict(small(model.blocks[0].q._f8sub.plan.recipe, spread=1.0).state_dict())


def stepped(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=1e-2).step()


CHANGES = (scaled, loaded, stepped, f8sub.precompute_scales)


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_weights_that_are_changed_between_steps_are_read(monkeypatch, recipe):
    def change(index: int, model: nn.Module, optimizer: Any) -> None:
        if 4 <= index < 4 + len(CHANGES):
            CHANGES[index - 4](model)

    step = both(monkeypatch, recipe, steps=12, between=change)
    assert step.how == "replayed"


def test_evaluation_between_steps_sees_todays_weights(monkeypatch):
    seen: list[float] = []

    def evaluate(index: int, model: nn.Module, optimizer: Any) -> None:
        with torch.no_grad():
            seen.append(model(batch_of(99)[0]).sum().item())

    both(monkeypatch, "delayed", between=evaluate)
    assert seen[:STEPS] == seen[STEPS:]
    assert len(set(seen)) == STEPS


def test_a_rate_that_changes(monkeypatch):
    def change(index: int, model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + index)

    both(monkeypatch, "rowwise", between=change)


def rates_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have graphs read rates that are tensors on a CPU as they read those on a GPU."""
    for room in (optimizers, dependencies):
        monkeypatch.setattr(room, "is_on_device", lambda rate: isinstance(rate, torch.Tensor))


def test_a_rate_that_is_a_tensor(imitated, monkeypatch):
    rates_are_read_in_place(monkeypatch)
    model = small("rowwise")
    optimizer = adamw(model, lr=torch.tensor(1e-2))
    step = step_of(model, optimizer)
    assert hows(step, 5) == ["l", "l", "l", "c", "r"]
    optimizer.param_groups[0]["lr"].fill_(0.0)
    before = model.blocks[0].q.weight.detach().clone()
    step(*batch_of(5))
    assert step.how == "replayed"
    assert torch.equal(model.blocks[0].q.weight, before)
    # The graph would go on with the tensor that it has read.
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
    step(*batch_of(6))
    assert step.how == "launched"
    assert "options changed: lr of group 0" in step.why_launched
    assert not torch.equal(model.blocks[0].q.weight, before)


def frozen(model: nn.Module, optimizer: Any) -> None:
    model.blocks[0].q.weight.requires_grad_(False)


def evaluating(model: nn.Module, optimizer: Any) -> None:
    model.eval()


def moved(model: nn.Module, optimizer: Any) -> None:
    model.lm_head.bias.data = model.lm_head.bias.data.clone()


def replaced(model: nn.Module, optimizer: Any) -> None:
    model.blocks[0].norm1.weight = nn.Parameter(model.blocks[0].norm1.weight.detach().clone())


def grown_by_a_module(model: nn.Module, optimizer: Any) -> None:
    model.blocks.append(copy.deepcopy(model.blocks[0]))


def given_another_head(model: nn.Module, optimizer: Any) -> None:
    model.lm_head = copy.deepcopy(model.lm_head)


def exchanged(model: nn.Module, optimizer: Any) -> None:
    block = model.blocks[0]
    block.q, block.k = block.k, block.q


def given_a_bias(model: nn.Module, optimizer: Any) -> None:
    model.blocks[0].q.bias = nn.Parameter(torch.ones(model.blocks[0].q.out_features))


def given_a_buffer(model: nn.Module, optimizer: Any) -> None:
    model.blocks[0].norm1.register_buffer("extra", torch.zeros(1))


def converted_back(model: nn.Module, optimizer: Any) -> None:
    f8sub.convert_from_float8(model)


def converted_again(model: nn.Module, optimizer: Any) -> None:
    f8sub.convert_from_float8(model)
    f8sub.convert_to_float8(model, "tensorwise", min_dim=1)


def given_another_number(model: nn.Module, optimizer: Any) -> None:
    model.blocks[0].norm1.eps = 1e-3


def given_another_forward(model: nn.Module, optimizer: Any) -> None:
    norm = model.blocks[0].norm1
    norm.forward = lambda x: nn.LayerNorm.forward(norm, x) * 2


def given_a_tensor(model: nn.Module, optimizer: Any) -> None:
    model.lm_head.in_features = torch.full((2,), 32)


def rounded(model: nn.Module, optimizer: Any) -> None:
    f8sub.keep_swiglu_input_in_float8(model)


def nothing(*given: Any, **named: Any) -> None:
    pass


def hooked(model: nn.Module, optimizer: Any) -> None:
    model.blocks[0].register_forward_pre_hook(nothing)


def hooked_in_backward(model: nn.Module, optimizer: Any) -> None:
    model.blocks[0].register_full_backward_hook(nothing)


def hooked_at_a_gradient(model: nn.Module, optimizer: Any) -> None:
    model.blocks[0].norm1.weight.register_post_accumulate_grad_hook(nothing)


def hooked_behind_the_step(model: nn.Module, optimizer: Any) -> None:
    optimizer.register_step_post_hook(nothing)


def decayed(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.5


def grown(model: nn.Module, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def moved_a_moment(model: nn.Module, optimizer: Any) -> None:
    moment = optimizer.state[model.lm_head.weight]["exp_avg"]
    moment.data = moment.data.clone()


def forgotten(model: nn.Module, optimizer: Any) -> None:
    optimizer.state.clear()


def reloaded(model: nn.Module, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (frozen, "was frozen or unfrozen"),
        (evaluating, r"model\.train\(\) or model\.eval\(\)"),
        (moved, "of the model a tensor was moved"),
        (replaced, r"of the model a tensor of shape \(32,\) was replaced"),
        (grown_by_a_module, "blocks has more or fewer modules, parameters or buffers"),
        (given_another_head, "a module was replaced"),
        (exchanged, "a module was replaced"),
        (given_a_bias, "a parameter or buffer that was None is a tensor"),
        (given_a_buffer, r"blocks\.0\.norm1 has more or fewer modules, parameters or buffers"),
        (converted_back, r"blocks\.0\.q was given another class"),
        (converted_again, r"blocks\.0\.q was converted again"),
        (given_another_number, r"blocks\.0\.norm1\.eps changed"),
        (given_another_forward, r"blocks\.0\.norm1\.forward changed"),
        (given_a_tensor, r"lm_head\.in_features changed"),
        (rounded, "hooks of modules were registered"),
        (hooked, "hooks of modules were registered"),
        (hooked_in_backward, "hooks of modules were registered"),
        (hooked_at_a_gradient, r"of the model a tensor of shape \(32,\) has other hooks"),
        (hooked_behind_the_step, "the optimizer has other hooks"),
        (decayed, "options changed: weight_decay of group 0"),
        (grown, r"options changed: \d+ groups, \d+ before"),
        (moved_a_moment, "state was loaded, moved or replaced: a tensor was moved"),
        (forgotten, r"state was loaded, moved or replaced: 0 tensors, \d+ before"),
        (reloaded, "state was loaded, moved or replaced"),
    ],
)
def test_what_a_graph_has_as_a_constant_is_captured_anew(imitated, change, said):
    model = small("rowwise")
    optimizer = adamw(model)
    step = step_of(model, optimizer)
    assert hows(step, 5) == ["l", "l", "l", "c", "r"]
    change(model, optimizer)
    step(*batch_of(5))
    assert step.how == "launched"
    assert re.search(said, step.why_launched)
    assert hows(step, 4) == ["l", "l", "c", "r"]


def test_a_function_of_a_module_that_is_replaced(imitated):
    model = small("rowwise")
    norm = model.blocks[0].norm1
    norm.doubles, norm.forward = (lambda x: 2 * x), norm.forward
    step = step_of(model)
    assert hows(step, 5) == ["l", "l", "l", "c", "r"]
    norm.forward = nn.LayerNorm.forward.__get__(norm)  # the same, bound again
    assert hows(step, 1) == ["r"]
    norm.doubles = lambda x: 2.5 * x
    step(*batch_of(5))
    assert step.how == "launched"
    assert "blocks.0.norm1.doubles changed" in step.why_launched


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (lambda model: model.blocks[0].register_forward_pre_hook, "hooks of modules were registered"),
        (
            lambda model: model.lm_head.weight.register_post_accumulate_grad_hook,
            r"\(11, 32\) has other hooks",
        ),
        (lambda model: model.lm_head.weight.register_hook, r"\(11, 32\) has other hooks"),
    ],
    ids=["module", "accumulated", "gradient"],
)
def test_a_hook_that_is_one_more_or_gone(imitated, of, said):
    model = small("rowwise")
    kept = of(model)(nothing)
    step = step_of(model)
    assert hows(step, 5) == ["l", "l", "l", "c", "r"]
    for change in (lambda: of(model)(nothing), kept.remove):
        change()
        step(*batch_of(5))
        assert step.how == "launched"
        assert re.search(said, step.why_launched)
        assert hows(step, 4) == ["l", "l", "c", "r"]


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_a_hook_of_all_modules_that_is_one_more_or_gone(imitated, kind):
    step, register = step_of(small("rowwise")), getattr(nn.modules.module, f"register_module_{kind}_hook")
    assert hows(step, 5) == ["l", "l", "l", "c", "r"]
    hook = register(nothing)
    try:
        step(*batch_of(5))
        assert step.why_launched.endswith("hooks of all modules were registered or removed")
        assert hows(step, 4) == ["l", "l", "c", "r"]
    finally:
        hook.remove()
    step(*batch_of(5))
    assert step.why_launched.endswith("hooks of all modules were registered or removed")


class WithCounts(torch.optim.AdamW):
    """Has a number among its states, which each step that is launched or captured replaces."""

    def step(self, *given: Any) -> None:
        super().step(*given)
        for state in self.state.values():
            state["count"] = state.get("count", 1000) + 1


def test_numbers_among_an_optimizers_states_are_its_own(imitated):
    model = small("rowwise")
    optimizer = WithCounts(model.parameters(), fused=True)
    step = step_of(model, optimizer)
    assert hows(step, 6) == ["l", "l", "l", "c", "r", "r"]
    optimizer.state[model.lm_head.weight]["count"] = torch.zeros(1)
    step(*batch_of(6))
    assert "state was loaded, moved or replaced" in step.why_launched


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def in_tf32() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "context",
    [f8sub.autocast, functools.partial(torch.autocast, "cuda", torch.bfloat16), deterministic, in_tf32],
)
def test_a_context_is_captured_anew(imitated, context):
    step = step_of(small("rowwise"))
    hows(step, 5)
    with context():
        step(*batch_of(5))
    assert "autocast, grad mode, matmul precision or deterministic mode" in step.why_launched


def divided(model: Any) -> None:
    model.set_gradient_divide_factor(5.0)


def given_another_reduction(model: Any) -> None:
    f8sub.reduce_gradients_in_float8(model)


def kept_gathered(model: Any) -> None:
    model.set_reshard_after_forward(False)


def averaged_by_a_hook(model: Any) -> None:
    model.set_all_reduce_hook(lambda gradient: gradient.mul_(0.5))


SHARDING = {
    divided: "gradient_divide_factor",
    given_another_reduction: "reduce_scatter_comm",
    kept_gathered: "post_forward_mesh_info",
    averaged_by_a_hook: "all_reduce_hook",
}


def with_an_option_that_changes(
    rank: int, world: int, change: Callable[[Any], None]
) -> tuple[list[Any], list[Any], str]:
    def train(imitated: bool) -> tuple[list[Any], str]:
        with pytest.MonkeyPatch.context() as patch:
            if imitated:
                imitate(patch)
            model = shard(transformer("rowwise", spread=2.0), BF16)
            # gloo knows no sum that is divided on the way.
            model.set_force_sum_reduction_for_comms(True)
            step = step_of(model)
            found = [step(*batch_of(index, rank)).item() for index in range(5)]
            change(model)
            found.append(step(*batch_of(5, rank)).item())
            why = step.why_launched or ""
            found += [step(*batch_of(index, rank)).item() for index in range(6, 10)]
            return [*found, step.how], why

    launched, _ = train(False)
    replayed, why = train(True)
    return launched[:-1], replayed, why


class Counting(nn.Linear):
    """A layer that counts its calls."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_number_that_each_step_changes(imitated):
    model = small("rowwise")
    model.lm_head.__class__ = Counting
    model.lm_head.calls = 0
    step = step_of(model)
    assert hows(step, 2) == ["l", "l"]
    with pytest.warns(f8sub.Float8Warning, match=r"changed numbers of modules \(lm_head\.calls: 2 to 3\)"):
        step(*batch_of(2))
    assert hows(step, 3) == ["c", "r", "r"]
    assert model.lm_head.calls == 4


class Scale(nn.Module):
    """A layer to script."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_a_part_that_is_scripted(imitated):
    model = small("rowwise")
    model.blocks[0].norm1 = nn.Sequential(model.blocks[0].norm1, torch.jit.script(Scale()))
    assert hows(step_of(model), 6) == ["l", "l", "l", "c", "r", "r"]


def of_replicas(rank: int, world: int) -> tuple[str | None, str | None]:
    model = DistributedDataParallel(small("rowwise"))
    x, _ = batch_of(0)
    for seed in range(2):
        y = model(x)
        y.backward(gaussian(tuple(y.shape), generator(seed)))
    captured = dependencies.Dependencies([model], [], None)
    with torch.no_grad():
        model(x)
    evaluated = captured.difference()
    with model.no_sync():
        return evaluated, captured.difference()


def test_replicas_that_evaluate_are_as_they_were(ranks):
    """What DistributedDataParallel notes of each forward is no constant; that gradients stay apart is one."""
    assert ranks(1, of_replicas) == [(None, "require_backward_grad_sync changed")]


@pytest.mark.parametrize("change", long_but([divided, given_another_reduction], SHARDING))
def test_options_of_sharding_that_change(ranks, change):
    for launched, replayed, why in ranks(2, with_an_option_that_changes, change):
        assert replayed == [*launched, "replayed"]
        assert f"an option of FSDP2 changed: {SHARDING[change]} of group" in why


@pytest.mark.parametrize(
    ("other", "expected"), [("launch", "lllcr" + "ll" + "r"), ("capture", "lllcr" + "lc" + "r")]
)
def test_batches_of_another_shape(imitated, other, expected):
    step = step_of(small("rowwise"), other_batches=other)
    assert "".join([*hows(step, 5), *hows(step, 2, size=3), *hows(step, 1)]) == expected


def test_an_optimizer_that_the_host_steps_is_launched(monkeypatch):
    def run() -> tuple[list[float], f8sub.GraphedStep]:
        model = small("rowwise", spread=2.0)
        step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return [step(*batch_of(index)).item() for index in range(STEPS)], step

    launched, _ = run()
    imitate(monkeypatch)
    replayed, step = run()
    assert replayed == launched
    assert step.how == "replayed"
    assert step.why_optimizer_launched.startswith("SGD steps by the host")


def test_without_an_optimizer_gradients_are_those_of_the_call(monkeypatch):
    def run() -> list[torch.Tensor]:
        model = small("rowwise", spread=2.0)
        step = f8sub.graph_step(forward_backward_of(model), model)
        for index in range(STEPS):
            step(*batch_of(index))
        return [parameter.grad for parameter in model.parameters()]

    launched = run()
    imitate(monkeypatch)
    for one, other in zip(run(), launched, strict=True):
        assert torch.equal(one, other)


def test_a_capture_that_fails_is_told_and_launched(imitated):
    model = small("rowwise", spread=2.0)
    inner = forward_backward_of(model)

    def reads(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = inner(x, target)
        loss.item()
        return loss

    step = f8sub.graph_step(reads, model, adamw(model))
    hows(step, 3)
    with pytest.warns(
        f8sub.Float8Warning, match="launches every step: RuntimeError: .* the host reads a value"
    ):
        losses = [step(*batch_of(index)).item() for index in range(3, STEPS)]
    assert step.how == "launched"
    assert "the host reads a value" in step.why_launched
    assert losses == trained("rowwise")[0][3:]


def test_an_optimizer_that_cannot_be_captured_is_launched(imitated):
    model = small("rowwise", spread=2.0)
    optimizer = adamw(model)
    optimizer.register_step_pre_hook(lambda *_: next(iter(model.parameters())).sum().item() and None)
    step = step_of(model, optimizer)
    hows(step, 3)
    with pytest.warns(f8sub.Float8Warning, match="captures forward and backward and launches the optimizer"):
        losses = [step(*batch_of(index)).item() for index in range(3, STEPS)]
    assert step.how == "replayed"
    assert losses == trained("rowwise")[0][3:]


def told_of_nan(model: nn.Module, before: int, rank: int = 0) -> str:
    """What calls did, by initials, and t where NaN was told: written after so many calls, and gone after four more."""
    optimizer = adamw(model)
    step, found = step_of(model, optimizer), ""
    weights = [weight.detach().clone() for weight in model.parameters()]
    for index in range(before + 8):
        with torch.no_grad():
            if index == before:
                model.blocks[0].q.weight.fill_(torch.nan)
            elif index == before + 4:
                for weight, value in zip(model.parameters(), weights, strict=True):
                    weight.copy_(value)
                for state in optimizer.state.values():
                    state["exp_avg"].zero_()
                    state["exp_avg_sq"].zero_()
        try:
            step(*batch_of(index, rank))
            found += step.how[0]
        except f8sub.Float8NumericsError as error:
            found += "t" if "blocks.0.q" in str(error) else "other"
    return found


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_nan_is_told_by_the_call_after_the_next_and_by_each_until_it_is_gone(imitated, recipe):
    assert told_of_nan(small(recipe), 5) == "lllcr" + "rttt" + "lrrr"


def test_nan_is_told_again_where_a_graph_is_captured_next(imitated):
    """A capture tells what the last launched step found, and the first replay tells nothing."""
    assert told_of_nan(small("rowwise"), 2) == "ll" + "lttt" + "lcrr"
    assert told_of_nan(small("rowwise"), 3) == "lll" + "cttt" + "lrrr"


def nan_in_shards(rank: int, world: int, recipe: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        model = shard(small(recipe), BF16)
        imitate(patch)
        return told_of_nan(model, 5, rank)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_nan_in_shards_is_told_by_each_call_until_it_is_gone(ranks, world, recipe):
    assert ranks(world, nan_in_shards, recipe) == ["lllcr" + "rttt" + "lrrr"] * world


def test_a_monitor_has_its_steps_launched(imitated):
    model = small("rowwise")
    step, monitor, found = step_of(model), f8sub.Monitor(model, every=3), []
    for index in range(8):
        with monitor:
            step(*batch_of(index))
        found.append(step.how[0])
    monitor.flush()
    assert {row.step for row in monitor.rows} == {0, 3, 6}
    assert "".join(found) == "llllcrlr"


@pytest.mark.parametrize(("free", "expected"), [(30, "llllcrlrrlr"), (29, "llllcrllllc")])
def test_a_graph_is_freed_where_a_launched_step_would_not_fit_beside_it(
    imitated, monkeypatch, free, expected
):
    """The capture takes 32 bytes, of which 5 are in use between replays; 2 of the allocator's others are unused."""
    before, after = (free + 32, 102, 100), (free, 134, 105)
    memory = itertools.chain([before], itertools.repeat(after))
    monkeypatch.setattr(recorded, "memory_of", lambda device: next(memory))
    model = small("rowwise")
    step, monitor, found = step_of(model), f8sub.Monitor(model, every=3), []
    why = []
    for index in range(11):
        with monitor:
            step(*batch_of(index))
        found.append(step.how[0])
        why.append(step.why_launched)
    assert "".join(found) == expected
    assert ("the graph was freed" in why[6]) == (free < 30)


def test_an_attached_monitor_counts_replays(imitated):
    model = small("rowwise")
    optimizer = adamw(model)
    step, monitor = step_of(model, optimizer), f8sub.Monitor(model, every=3)
    monitor.attach(optimizer)
    found = hows(step, 8)
    monitor.flush()
    assert {row.step for row in monitor.rows} == {0, 3, 6}
    assert [found[index] for index in (3, 6)] == ["l", "l"]
    assert found.count("r") >= 2


def test_a_monitor_within_the_function_is_an_error(imitated):
    model = small("rowwise")
    monitor, inner = f8sub.Monitor(model), forward_backward_of(model)

    def watched(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with monitor:
            return inner(x, target)

    step = f8sub.graph_step(watched, model, adamw(model))
    hows(step, 3)
    with pytest.warns(f8sub.Float8Warning, match="enter it around the call of the step"):
        hows(step, 1)


def test_constants_and_nests_of_a_batch(imitated):
    model = small("rowwise", spread=2.0)

    def forward_backward(batch: dict[str, Any], *, scale: float) -> dict[str, torch.Tensor]:
        loss = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["pair"][1]) * scale
        loss.backward()
        return {"loss": loss}

    step = f8sub.graph_step(forward_backward, model, adamw(model))
    for index in range(6):
        x, target = batch_of(index)
        assert step({"x": x, "pair": ("a", target)}, scale=2.0)["loss"].isfinite()
    assert step.how == "replayed"
    step({"x": x, "pair": ("a", target)}, scale=3.0)
    assert "another shape, dtype or constant" in step.why_launched
    with pytest.raises(f8sub.Float8ConfigError, match=r"given \{1\} in a batch"):
        step({"x": x, "pair": ({1}, target)}, scale=2.0)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((None, "model"), {}, "a function of a batch, got None"),
        ((print, None), {}, "takes a model"),
        ((print, "model", 3), {}, "an optimizer or None, got 3"),
        ((print, "model"), {"warmup": 0}, "1 or more, got"),
        ((print, "model"), {"other_batches": "replay"}, '"launch" or "capture", got'),
    ],
)
def test_arguments_that_are_none(arguments, options, said):
    model = small("rowwise")
    with pytest.raises(f8sub.Float8ConfigError, match=said):
        f8sub.graph_step(*(model if argument == "model" else argument for argument in arguments), **options)


def test_precompute_scales_within_ones_own_capture_is_an_error(rank, world):
    model = shard(small("rowwise"), BF16)
    f8sub.precompute_scales(model)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("f8sub.")]:
            patch.setattr(f"{name}.is_capturing", lambda tensor: True, raising=False)
        with pytest.raises(f8sub.Float8ConfigError, match=r"f8sub\.graph_step capture the whole step"):
            f8sub.precompute_scales(model)


def sending(rank: int, world: int) -> tuple[list[str], str]:
    """Steps of which each sends to the next rank, as a pipeline schedule does."""
    with pytest.MonkeyPatch.context() as patch:
        imitate(patch)
        model = small("rowwise")
        inner = forward_backward_of(model)

        def sends(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            if rank == 0:
                dist.send(x, 1)
            else:
                dist.recv(x, 0)
            return inner(x, target)

        step = f8sub.graph_step(sends, model, adamw(model))
        hows(step, 2)
        with pytest.warns(f8sub.Float8Warning, match="as pipeline schedules do"):
            hows(step, 1)
        return hows(step, 2), step.why_launched


def test_what_is_sent_to_one_rank_is_launched(ranks):
    (found, why), (other, whys) = ranks(2, sending)
    assert found == other == ["l", "l"]
    assert "distributed.send is called" in why
    assert "distributed.recv is called" in whys


@pytest.mark.parametrize("within", [True, False], ids=["in-the-graph", "launched-beside-it"])
@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_clipping_that_is_left_to_a_fused_step(monkeypatch, recipe, within):
    def run() -> tuple[list[list[float]], list[torch.Tensor], str]:
        model = small(recipe, spread=2.0)
        optimizer = adamw(model)
        fused = f8sub.optim.fuse_step(optimizer)
        usual = forward_backward_of(model, clip=None)

        def forward_backward(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return usual(x, target), fused.clip_grad_norm_(0.1)

        step = f8sub.graph_step(forward_backward, model, optimizer if within else None)
        found = []
        for index in range(STEPS):
            found.append([each.item() for each in step(*batch_of(index))])
            if not within:
                optimizer.step()
        return found, list(model.parameters()), step.how

    launched, weights, _ = run()
    imitate(monkeypatch)
    replayed, others, how = run()
    assert how == "replayed"
    assert launched[0][1] > 0.1
    assert replayed == launched
    for one, other in zip(others, weights, strict=True):
        assert torch.equal(one, other)


def master_weights(model: nn.Module) -> torch.optim.Optimizer:
    return f8sub.optim.MasterWeights(adamw(model))


def guarded(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    f8sub.skip_step_if_nonfinite(optimizer)
    return optimizer


@pytest.mark.parametrize("optimizer_of", [master_weights, guarded])
@pytest.mark.parametrize("primary", [False, True], ids=["", "primary"])
def test_optimizers_of_f8sub(monkeypatch, optimizer_of, primary):
    if primary and optimizer_of is guarded:
        pytest.skip("primary weights need MasterWeights")

    def run() -> tuple[list[float], f8sub.GraphedStep]:
        model = small(None, spread=2.0).bfloat16()
        f8sub.convert_to_float8(model, recipe="rowwise", primary_weights=primary)
        step = step_of(model, optimizer_of(model))
        return [
            step(*(t.bfloat16() if t.is_floating_point() else t for t in batch_of(i))).item()
            for i in range(STEPS)
        ], step

    launched, _ = run()
    imitate(monkeypatch)
    replayed, step = run()
    assert launched[-1] != launched[0]
    assert replayed == launched
    assert (step.how, step.why_optimizer_launched) == ("replayed", None)


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_checkpointed_blocks(monkeypatch, recipe):
    def run() -> tuple[list[float], str]:
        model = checkpointed(small(recipe, spread=2.0))
        step = step_of(model)
        return [step(*batch_of(index)).item() for index in range(STEPS)], step.how

    launched, _ = run()
    imitate(monkeypatch)
    assert run() == (launched, "replayed")


def in_parts(rank: int, world: int, recipe: str, plan: str) -> tuple[list[float], list[float], str]:
    """Tensor-parallel layers; with four ranks FSDP2 shards the parts."""

    def train() -> tuple[list[float], str]:
        torch.manual_seed(0)
        model = nn.Sequential(FeedForward())
        f8sub.convert_to_float8(model, recipe=recipe, skip_defaults=False)
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "parts"))
        parallelize_module(model, mesh["parts"], PLANS[plan])
        if world > 2:
            fully_shard(model, mesh=mesh["shard"])
        optimizer = adamw(model, lr=1e-2)

        def forward_backward(x: torch.Tensor) -> torch.Tensor:
            tokens = x if plan == "whole tokens" else x.chunk(2, 1)[rank % 2]
            loss = (model(tokens) - 1).square().mean()
            loss.backward()
            return loss

        step = f8sub.graph_step(forward_backward, model, optimizer)
        rng = generator(rank // 2)
        found = [step(gaussian((2, 12, WIDTH), rng)).item() for _ in range(STEPS)]
        return found, step.how + str(step.why_launched)

    launched, _ = train()
    with pytest.MonkeyPatch.context() as patch:
        imitate(patch)
        return launched, *train()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("recipe", long_but(("rowwise",), ("tensorwise", "rowwise", "blockwise", "delayed")))
@pytest.mark.parametrize("world", long_but((2,), (2, 4)))
def test_of_tensor_parallel_layers(ranks, world, recipe, plan):
    if recipe == "delayed" and plan in ("one gather", "high precision"):
        pytest.skip("delayed scaling does not take these styles")
    for launched, replayed, how in ranks(world, in_parts, recipe, plan):
        assert how == "replayedNone"
        assert launched[-1] != launched[0]
        assert replayed == launched


def with_averages(rank: int, world: int) -> list[list[object]]:
    """Losses and histories: without an evaluation of other weights after steps, with it, and as graphs.md says."""

    def trained(evaluates: bool, rolls: bool) -> list[object]:
        torch.manual_seed(0)
        model = nn.Sequential(FeedForward())
        f8sub.convert_to_float8(model, recipe="delayed", skip_defaults=False)
        fully_shard(model[0])  # FSDP2 leaves a root's own parameters gathered after an evaluation
        fully_shard(model)

        def forward_backward(x: torch.Tensor) -> torch.Tensor:
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        step, rng, found = (
            f8sub.graph_step(forward_backward, model, adamw(model, lr=1e-2)),
            generator(rank),
            [],
        )
        for _ in range(STEPS):
            x = gaussian((2, 12, WIDTH), rng)
            found.append(step(x).item())
            if not evaluates:
                continue
            if rolls:
                f8sub.precompute_scales(model)
            with torch.no_grad():
                own = [parameter.detach().clone() for parameter in model.parameters()]
                for parameter in model.parameters():
                    parameter.mul_(0.5)
                model(x)
                for parameter, value in zip(model.parameters(), own, strict=True):
                    parameter.copy_(value)
        f8sub.precompute_scales(model)
        return [*found, *(buffer.tolist() for buffer in model.buffers())]

    return [trained(False, False), trained(True, False), trained(True, True)]


@pytest.mark.parametrize("world", [1, 2])
def test_averaged_weights_of_delayed_scaling_under_fsdp2(ranks, world):
    """graphs.md: ``precompute_scales`` before they are swapped in keeps their amaxes out of the histories."""
    for usual, mixed, apart in ranks(world, with_averages):
        assert apart == usual
        assert mixed != usual
