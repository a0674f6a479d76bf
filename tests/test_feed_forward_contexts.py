"""Fused feed-forwards and recipe contexts: apart where another recipe is in use, and fused before, beside and after."""

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import f8sub
from f8sub import context, feed_forward
from tests.selection import long_but
from tests.test_feed_forward import assert_equal, both, inputs, on_each_recipe, ran_fused, results

OWN, OTHER = "tensorwise", "rowwise"
Context = Callable[[], AbstractContextManager]
CONTEXTS: dict[str, Context] = {
    "another": lambda: f8sub.autocast(OTHER),
    "high precision": lambda: f8sub.autocast(enabled=False),
}
SAME: dict[str, Context] = {
    "none": nullcontext,
    "its own": lambda: f8sub.autocast(),
    "its own by name": lambda: f8sub.autocast(OWN),
    "its own inside another": lambda: Both(f8sub.autocast(OTHER), f8sub.autocast(OWN)),
}
REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


class Both:
    """One context inside another."""

    def __init__(self, outer: AbstractContextManager, inner: AbstractContextManager) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: object) -> None:
        self.inner.__exit__(None, None, None)
        self.outer.__exit__(None, None, None)


def within(around: Context, run: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The forward inside the context, which is left before backward."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        with around():
            return run(x)

    return forward


def checkpointed(model: nn.Module, reentrant: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: checkpoint(model, x, use_reentrant=reentrant)


@pytest.fixture
def fused_calls(monkeypatch):
    """One entry for each forward that ran fused, those that are repeated too."""
    calls, forward = [], feed_forward._forward
    monkeypatch.setattr(
        feed_forward, "_forward", lambda x, *rest, **keep: calls.append(x.shape) or forward(x, *rest, **keep)
    )
    return calls


@pytest.mark.parametrize("name", CONTEXTS)
def test_fused_again_after_a_context_has_closed(name):
    plain, fused = both(OWN)
    x, dy = inputs()
    before = results(fused, x, dy)
    with CONTEXTS[name]():
        assert not ran_fused(fused, x)
        assert_equal(results(fused, x, dy), results(plain, x, dy))
    assert ran_fused(fused, x)
    assert_equal(results(fused, x, dy), before)


@pytest.mark.parametrize("name", SAME)
def test_contexts_that_ask_for_no_other_recipe_leave_it_fused(name):
    plain, fused = both(OWN)
    x, dy = inputs()
    with SAME[name]():
        assert ran_fused(fused, x)
    assert_equal(results(fused, x, dy, within(SAME[name], fused)), results(plain, x, dy))


def test_a_context_of_another_thread_is_not_this_ones():
    _, fused = both(OWN)
    x, _ = inputs()
    inside, done, found = threading.Event(), threading.Event(), []

    def work() -> None:
        with f8sub.autocast(OTHER):
            inside.set()
            done.wait(30)
            found.append(ran_fused(fused, x))

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(30)
    assert ran_fused(fused, x)
    done.set()
    thread.join()
    assert found == [False]


@REENTRANT
@pytest.mark.parametrize("name", CONTEXTS)
@on_each_recipe
def test_a_repeated_forward_uses_the_context_of_the_first(recipe, name, reentrant):
    """Whose recipe is the layers' own in one case: it is fused then, and so when it is repeated."""
    plain, fused = both(recipe)
    x, dy = inputs()
    right = results(plain, x, dy, within(CONTEXTS[name], plain))
    assert_equal(results(fused, x, dy, within(CONTEXTS[name], checkpointed(fused, reentrant))), right)


@REENTRANT
def test_outside_of_contexts_a_forward_is_repeated_fused(reentrant, fused_calls):
    plain, fused = both(OWN)
    x, dy = inputs()
    with f8sub.autocast(OTHER):
        fused(x)
    assert not fused_calls
    found = results(fused, x, dy, checkpointed(fused, reentrant))
    assert len(fused_calls) == 2
    assert_equal(found, results(plain, x, dy))


@REENTRANT
def test_a_context_around_backward_repeats_what_ran(reentrant, fused_calls):
    plain, fused = both(OWN)
    x, dy = inputs()
    leaf = x.clone().requires_grad_()
    y = checkpointed(fused, reentrant)(leaf)
    with f8sub.autocast(OTHER):
        y.backward(dy)
    assert len(fused_calls) == 2
    found = [y.detach(), leaf.grad, *(p.grad for p in fused.parameters())]
    assert_equal(found, results(plain, x, dy))


def test_microbatches_of_several_contexts_are_told_apart_by_their_graphs():
    plain, fused = both(OWN)
    around = [nullcontext, CONTEXTS["another"], CONTEXTS["high precision"], nullcontext]
    batches = [inputs(step=step) for step in range(len(around))]
    xs = [x.clone().requires_grad_() for x, _ in batches]
    ys = [within(each, checkpointed(fused, False))(x) for each, x in zip(around, xs, strict=True)]
    for i in (2, 0, 3, 1):
        fused.zero_grad()
        ys[i].backward(batches[i][1])
        found = [ys[i].detach(), xs[i].grad, *(p.grad for p in fused.parameters())]
        assert_equal(found, results(plain, *batches[i], within(around[i], plain)))


@REENTRANT
def test_several_contexts_in_one_graph_cannot_be_told_apart(reentrant):
    _, fused = both(OWN)
    x, dy = inputs()
    x.requires_grad_()
    run = checkpointed(fused, reentrant)
    y = within(CONTEXTS["another"], run)(x) + run(x)
    with pytest.raises(f8sub.Float8ConfigError, match=r"w1: .*repeated inside backward.*rowwise, tensorwise"):
        y.backward(dy)


def test_what_is_remembered_dies_with_the_graph_and_needs_a_checkpoint():
    _, fused = both(OWN)
    x, dy = inputs()
    results(fused, x, dy, within(SAME["its own"], fused))
    layers = list(fused.children())
    assert not any(layer in context._records for layer in layers)
    y = checkpointed(fused, False)(x.clone().requires_grad_())
    assert [len(context._records[layer]._nodes) for layer in layers] == [1, 1, 1]
    y.backward(dy)
    del y
    assert [len(context._records[layer]._nodes) for layer in layers] == [0, 0, 0]


class Blocks(nn.Module):
    """Two feed-forwards, compiled one by one."""

    def __init__(self, fused: nn.Module, *, compiled: bool, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(copy.deepcopy(fused) for _ in range(2))
        if checkpoints:
            self.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in self.blocks)
        if compiled:
            for block in self.blocks:
                block.compile(backend="aot_eager", fullgraph=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.sin(block(x))
        return x


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("checkpoints", long_but([True], [False, True]), ids=["", "checkpointed"])
def test_compiled_each_recipe_has_one_graph(checkpoints, fresh_compiler, monkeypatch):
    """One more, once, for the first context of the process, which layers do not ask for before."""
    monkeypatch.setattr(context.contexts, "entered", False)
    plain, fused = both(OWN)
    eager = Blocks(plain, compiled=False)
    compiled = Blocks(fused, compiled=True, checkpoints=checkpoints)
    x, dy = inputs()
    assert_equal(results(compiled, x, dy), results(eager, x, dy))
    assert counters["stats"]["unique_graphs"] == 1
    around = [*CONTEXTS.values(), nullcontext]
    right = [results(eager, x, dy, within(each, eager)) for each in around]
    for each, expected in zip(around, right, strict=True):
        assert_equal(results(compiled, x, dy, within(each, compiled)), expected)
    assert counters["stats"]["unique_graphs"] == 1 + len(around)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for each, expected in zip(around, right, strict=True):
            assert_equal(results(compiled, x, dy, within(each, compiled)), expected)
    assert not counters["graph_break"]


class Inside(nn.Module):
    """Each quarter of x elsewhere, so that nothing but the weights' gradients is a sum, of which order matters."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = x.chunk(4, dim=1)
        ys = [self.block(first)]
        with f8sub.autocast(OTHER):
            ys.append(self.block(second))
            with f8sub.autocast(enabled=False):
                ys.append(self.block(third))
        ys.append(self.block(fourth))
        return torch.cat(ys, dim=1)


@pytest.mark.long
def test_contexts_inside_compiled_code(fresh_compiler):
    """Of the four forwards two are fused, one function each, and one has its three layers in float8."""
    plain, fused = both(OWN)
    functions = []

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., object]:
        functions.append(sum("autograd_function_apply" in str(node.target) for node in graph.graph.nodes))
        return aot_eager(graph, example)

    for model in (fused, plain):
        compiled = Inside(model)
        compiled.compile(backend=backend, fullgraph=True)
        found, right = (results(run, *inputs()) for run in (compiled, Inside(plain)))
        assert_equal(found[:2], right[:2])
    of_fused, of_plain = functions
    assert of_plain - of_fused == 2 * (3 - 1)


def test_compiled_code_in_a_checkpoint_is_refused_where_the_context_is_outside(fresh_compiler):
    """As it is of layers that are not fused: torch notices that other tensors were saved."""
    _, fused = both(OWN)
    compiled = Blocks(fused, compiled=True)
    x, dy = inputs()
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        results(compiled, x, dy, within(CONTEXTS["another"], checkpointed(compiled, False)))
