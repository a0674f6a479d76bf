"""MasterWeight: any change makes the next forward read it anew, nothing else does; plain wherever it is stored."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd.graph import increment_version
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import f8sub
from f8sub.weights.master_weight import marks_of
from tests import layers
from tests.compiling import past_dispatch
from tests.counting import Float8Work
from tests.data_sets import gaussian, generator
from tests.kernels.interpreted import interpreted
from tests.layers import on_each_recipe

ROWS, COLS = layers.N, layers.K


def made(recipe: str = "tensorwise") -> nn.Sequential:
    return nn.Sequential(layers.made(recipe))


def x_of() -> torch.Tensor:
    return gaussian((8, COLS), generator(2))


def fresh_output(model: nn.Module, recipe: str, x: torch.Tensor) -> torch.Tensor:
    """What a layer converted just now gives with the same values."""
    layer = nn.Linear(COLS, ROWS, dtype=model[0].weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(model[0].weight)
        layer.bias.copy_(model[0].bias)
    return f8sub.convert_to_float8(nn.Sequential(layer), recipe=recipe)(x)


def rebind_twice(model: nn.Module) -> None:
    """The storage that is let go first may be given out again for the second."""
    weight = model[0].weight
    weight.data = torch.zeros(ROWS, COLS)
    weight.data = gaussian((ROWS, COLS), generator(9))


def in_place(change):
    def apply(model: nn.Module) -> None:
        with torch.no_grad():
            change(model[0].weight)

    return apply


CHANGES = {
    "load_state_dict-assign": lambda m: m.load_state_dict(
        {"0.weight": gaussian((ROWS, COLS), generator(7)), "0.bias": torch.zeros(ROWS)}, assign=True
    ),
    "rebind-data-twice": rebind_twice,
    "to-bf16-and-back": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "out=": in_place(lambda w: torch.mul(gaussian((ROWS, COLS), generator(4)), 2.0, out=w)),
    "set_": in_place(lambda w: w.set_(gaussian((ROWS, COLS), generator(4)))),
    "setitem": in_place(lambda w: w.__setitem__(0, 9.0)),
    "setitem-mask": in_place(lambda w: w.__setitem__(w > 0.5, 9.0)),
}
"""Besides those of tests/contract/ranks/test_weights.py."""
# One of each operator that torch makes a view by: reshape, flatten and view_as are views, narrow is a slice.
VIEWS = {
    "view": lambda w: w.view(-1),
    "slice": lambda w: w[:7],
    "split": lambda w: w.split(7)[0],
    "split-sizes": lambda w: w.split([8, 40])[0],
    "select": lambda w: w[0],
    "unbind": lambda w: w.unbind()[2],
    "t": lambda w: w.t(),
    "permute": lambda w: w.permute(1, 0),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "diagonal": lambda w: w.diagonal(),
    "unfold": lambda w: w.unfold(0, 2, 2),
    "expand": lambda w: w.expand(ROWS, COLS),
    "squeeze": lambda w: w.squeeze(),
    "view-dtype": lambda w: w.view(torch.int32).view(torch.float32),
    "a-view-of-a-view": lambda w: w[2:9][1:, :4],
    "a-selection-of-a-view": lambda w: w[2:9][1],
}


@pytest.mark.parametrize("change", CHANGES, ids=list(CHANGES))
@on_each_recipe
def test_the_forward_after_a_change_reads_the_weight_as_it_is(recipe, change):
    model, x = made(recipe), x_of()
    before = model(x).detach()
    CHANGES[change](model)
    after = model(x)
    assert not torch.equal(after, before)
    assert torch.equal(after, fresh_output(model, recipe, x))


@pytest.mark.parametrize("view", VIEWS, ids=list(VIEWS))
@pytest.mark.parametrize("of", ["parameter", "data", "detached"], ids=str)
def test_a_write_through_a_view_is_seen(view, of):
    model, x = made(), x_of()
    weight = model[0].weight
    before = model(x).detach()
    with torch.no_grad():
        source = {"parameter": weight, "data": weight.data, "detached": weight.detach()}[of]
        VIEWS[view](source).add_(200.0)
    after = model(x)
    assert not torch.equal(after, before)
    assert torch.equal(after, fresh_output(model, "tensorwise", x))


@pytest.mark.parametrize("change", CHANGES, ids=list(CHANGES))
def test_marks_of_before_a_change_are_others(change):
    model = made()
    before = marks_of([model[0].weight], as_owned=True)
    assert marks_of([model[0].weight]) == before
    CHANGES[change](model)
    assert marks_of([model[0].weight]) != before


@pytest.mark.parametrize("lend", [lambda m: m.state_dict(), rebind_twice], ids=["state-dict", "rebind"])
def test_marks_of_a_weight_that_others_may_write_to_are_never_those_of_before(lend):
    """A graph's replays change the weight, and what is noted then has to hold of the next look."""
    model = made()
    lent = lend(model)
    for _ in range(2):
        assert marks_of([model[0].weight]) != marks_of([model[0].weight], as_owned=True)
    del lent
    if model[0].weight.owns_storage:
        assert lend is not rebind_twice
        assert marks_of([model[0].weight]) == marks_of([model[0].weight], as_owned=True)


def test_what_another_process_writes_to_shared_memory_is_seen():
    """Stood for by a tensor in that memory which knows of no weight."""
    model, x = made(), x_of()
    model.share_memory()
    before = model(x).detach()
    memory = model[0].weight.data.untyped_storage()
    torch.empty(0).set_(memory, 0, (ROWS * COLS,)).mul_(2.0)
    after = model(x)
    assert not torch.equal(after, before)
    assert torch.equal(after, fresh_output(model, "tensorwise", x))


def test_a_compiled_function_that_writes_is_seen(fresh_compiler):
    model, x = made(), x_of()
    model(x)

    @torch.compile(backend="aot_eager")
    def grow(weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight.mul_(50.0)

    grow(model[0].weight)
    assert torch.equal(model(x), fresh_output(model, "tensorwise", x))


@interpreted
@pytest.mark.parametrize("of", ["parameter", "data"])
def test_a_kernel_in_compiled_code_is_seen_once_torch_is_told_outside_of_it(of):
    """Torch counts no version for kernels of users' own, and drops the call where it is inside of compiled code."""
    from tests.weights import users_kernel

    def tell_inside(weight: torch.Tensor) -> None:
        users_kernel.scale(weight)
        increment_version(weight)

    for function, told, is_seen in (
        (users_kernel.scale, False, False),
        (users_kernel.scale, True, True),
        (tell_inside, False, False),
    ):
        torch._dynamo.reset()
        model, x = made(), x_of()
        before, weight = model(x), model[0].weight
        with torch.no_grad(), users_kernel.interpreted() as runs:
            values = weight.detach().clone() * 20.0
            run = torch.compile(function, backend=past_dispatch, fullgraph=True)
            run(weight if of == "parameter" else weight.data)
        assert runs.call_count == 1
        assert torch.equal(weight.detach().clone(), values)
        if told:
            increment_version(weight)
        expected = fresh_output(model, "tensorwise", x) if is_seen else before
        assert torch.equal(model(x), expected)


def weights_cast(model: nn.Module, run) -> int:
    with Float8Work() as work:
        run()
    return sum(shape in ((ROWS, COLS), (COLS, ROWS)) for shape in work.casts)


CLEAN = {
    "forward-and-backward": lambda m: m(x_of().requires_grad_()).backward(gaussian((8, ROWS), generator(4))),
    "clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    "zero_grad": lambda m: m.zero_grad(),
    "deepcopy": lambda m: copy.deepcopy(m),
    "pickle": lambda m: torch.save(m[0].weight, io.BytesIO()),
    "parameters_to_vector": lambda m: parameters_to_vector(m.parameters()),
    "norm": lambda m: m[0].weight.norm().item(),
    "matmul": lambda m: x_of() @ m[0].weight.t(),
    "repr": lambda m: repr(m[0].weight),
    "train-and-eval": lambda m: m.eval().train(),
    "requires_grad_": lambda m: m.requires_grad_(True),
    "new-optimizer": lambda m: torch.optim.AdamW(m.parameters()),
    "to-its-own-dtype": lambda m: m.to(torch.float32),
    "conversion_report": f8sub.conversion_report,
    "precompute_scales": f8sub.precompute_scales,
    "quantize": lambda m: f8sub.quantize(m[0].weight, "tensorwise", "w", columnwise=False),
}


@pytest.mark.parametrize("operation", CLEAN, ids=list(CLEAN))
@on_each_recipe
def test_what_changes_nothing_casts_nothing_again(recipe, operation):
    model = made(recipe)
    model(x_of()).backward(gaussian((8, ROWS), generator(5)))
    CLEAN[operation](model)
    assert weights_cast(model, lambda: model(x_of())) == 0
    model[0].weight.mark_stale()
    assert weights_cast(model, lambda: model(x_of())) == 1


def to_another_dtype_while_a_graph_is_alive(model: nn.Module) -> None:
    y = model(x_of())
    model.to(torch.float64).to(torch.float32)
    del y


MOVES = {
    "to": lambda m: m.to(torch.bfloat16),
    "there-and-back": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "type": lambda m: m.type(torch.float16),
    "while-a-graph-is-alive": to_another_dtype_while_a_graph_is_alive,
}


@pytest.mark.parametrize("move", MOVES, ids=list(MOVES))
def test_codes_are_kept_of_a_weight_that_was_moved(move):
    """torch sets ``weight.data`` then, of which no operator tells."""
    model = made()
    MOVES[move](model)
    with torch.no_grad():
        model[0].weight.copy_(gaussian((ROWS, COLS), generator(6)))
    x = x_of().to(model[0].weight.dtype)
    assert weights_cast(model, lambda: model(x)) == 1
    assert weights_cast(model, lambda: model(x)) == 0
    model[0].weight.data = gaussian((ROWS, COLS), generator(7)).to(x.dtype)
    assert weights_cast(model, lambda: [model(x) for _ in range(2)]) == 2


@on_each_recipe
def test_codes_are_cast_once_a_step(recipe):
    """Three micro-batches, forward and backward: one cast of the weight; the step makes the next.

    Where columns are re-scaled from the codes, each backward does that, and frees them.
    """
    model = made(recipe)
    tile = f8sub.get_recipe(recipe).fprop.b.tile
    rescaled = 0 if tile.rows == tile.cols else 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def accumulate() -> None:
        for seed in range(3):
            x = gaussian((8, COLS), generator(seed)).requires_grad_()
            model(x).backward(gaussian((8, ROWS), generator(10 + seed)))

    for _ in range(3):
        assert weights_cast(model, accumulate) == 1 + rescaled
        optimizer.step()
        optimizer.zero_grad()


READ_AS = {
    "transposed": lambda weight: weight.t(),
    "first rows": lambda weight: weight[:16],
    "last rows": lambda weight: weight[16:],
    "columns": lambda weight: weight[:, :16],
}


@pytest.mark.parametrize("view", READ_AS, ids=list(READ_AS))
def test_a_view_of_the_weight_has_codes_of_its_own(view):
    """Of a square weight, whose transpose has its very shape."""
    layer = nn.Linear(COLS, COLS, bias=False)
    with torch.no_grad():
        layer.weight.copy_(gaussian((COLS, COLS), generator(1)))
    model = f8sub.convert_to_float8(nn.Sequential(layer), recipe="rowwise")
    weight = READ_AS[view](model[0].weight)
    x = gaussian((8, weight.shape[1]), generator(2)).requires_grad_()
    model(gaussian((8, COLS), generator(2)))
    y = torch.func.functional_call(model, {"0.weight": weight}, (x,))
    dy = gaussian(tuple(y.shape), generator(3))
    y.backward(dy)
    for found, expected in ((y, x @ weight.t()), (x.grad, dy @ weight)):
        assert (found - expected).norm() < 0.06 * expected.norm()


def test_compiled_code_is_handed_the_weight_itself():
    """Not a tensor of tensors, which AOTAutograd would have to look into at each call; however the weight lies."""
    handed: list[torch.Tensor] = []

    def compiler(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        def run(*args: torch.Tensor) -> Any:
            handed.extend(args)
            return graph(*args)

        return run

    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(COLS, COLS)), recipe="tensorwise")
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    for _ in range(2):
        y = compiled(x_of())
        assert any(tensor is model[0].weight for tensor in handed)
        assert torch.equal(y, model(x_of()))
        model[0].weight.data = model[0].weight.data.t()
        handed.clear()


def test_a_weight_that_is_a_later_part_of_a_storage_is_compiled():
    """As of a fused tensor of a checkpoint, or where ``vector_to_parameters`` laid weights side by side."""
    parts = gaussian((2 * COLS, COLS), generator(5)).chunk(2)
    layers = [nn.Linear(COLS, COLS, bias=False) for _ in parts]
    for layer, part in zip(layers, parts, strict=True):
        layer.weight = nn.Parameter(part)
    model = f8sub.convert_to_float8(nn.Sequential(*layers), recipe="rowwise")
    dy = gaussian((8, COLS), generator(6))

    def step(run: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        y = run(x_of())
        y.backward(dy)
        return [y.detach(), *(layer.weight.grad.clone() for layer in layers)]

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for factor in (1, -2):
        with torch.no_grad():
            layers[1].weight.mul_(factor)
        assert all(map(torch.equal, step(compiled), step(model)))


def test_parameters_that_share_one_buffer_are_compiled(fresh_compiler):
    """A bias as well as a weight lies in it."""
    layers = nn.Sequential(nn.Linear(COLS, COLS), nn.Linear(COLS, COLS))
    vector_to_parameters(parameters_to_vector(layers.parameters()).clone(), layers.parameters())
    model = f8sub.convert_to_float8(layers, recipe="tensorwise")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(x_of()), model(x_of()))
        vector_to_parameters(parameters_to_vector(model.parameters()).clone() * 2, model.parameters())


@pytest.mark.parametrize(
    "view", [lambda w: w.t(), lambda w: w.detach()[4:8], lambda w: w], ids=["t", "part", "all"]
)
def test_what_is_written_through_a_view_that_compiled_code_returned_is_seen(view, fresh_compiler):
    model, x = made(), x_of()
    found = torch.compile(view, backend="aot_eager", fullgraph=True)(model[0].weight)
    for factor in (3.0, -5.0):
        model(x)
        with torch.no_grad():
            found.mul_(factor)
        assert torch.equal(model(x), fresh_output(model, "tensorwise", x))


def test_torch_takes_a_weight_for_a_plain_tensor_and_kept_code_for_one_of_tensors():
    """AOTAutograd's code on disk may be of a version of f8sub whose weights it had to look into."""
    weight = made()[0].weight
    assert not is_traceable_wrapper_subclass(weight)
    inner = weight._inner
    assert type(inner) is torch.Tensor
    assert inner.data_ptr() == weight.data_ptr()
    rebuilt = type(weight).__tensor_unflatten__({"_inner": inner}, None, inner.shape, inner.stride())
    assert type(rebuilt) is type(weight)
    assert rebuilt.data_ptr() == weight.data_ptr()


def test_deepcopy_keeps_gradients_ties_and_requires_grad():
    model = nn.Sequential(nn.Linear(COLS, COLS), nn.Linear(COLS, COLS))
    model[1].weight = model[0].weight
    model = f8sub.convert_to_float8(model)
    model(x_of()).backward(gaussian((8, COLS), generator(4)))
    model[0].bias.requires_grad_(False)
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight
    assert torch.equal(twin[0].weight.grad, model[0].weight.grad)
    assert twin[0].weight.grad.data_ptr() != model[0].weight.grad.data_ptr()
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]


def test_a_parameter_pickles_as_a_plain_parameter():
    weight = made()[0].weight
    file = io.BytesIO()
    torch.save({"parameter": weight, "tensor": weight.detach()}, file)
    assert b"f8sub" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["parameter"]) is nn.Parameter
    assert type(loaded["tensor"]) is torch.Tensor
    assert loaded["parameter"].requires_grad


def test_it_can_be_read_as_a_tensor_can():
    values = made()[0].weight.detach()
    expected = torch.zeros(ROWS, COLS) + values
    assert torch.equal(torch.tensor(values.tolist()), expected)
    assert torch.equal(torch.from_numpy(values.numpy().copy()), expected)
    assert values[0, 0].item() == expected[0, 0]
