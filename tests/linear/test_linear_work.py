"""Float8Linear computes nothing it need not, names itself when it refuses, and recomputes bitwise."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import f8sub
from tests.counting import Float8Work
from tests.layers import K, M, N, block, dy_of, gradients, in_float8, made, on_each_recipe, results, x_of
from tests.models import equal
from tests.selection import long_but


def work_of(run) -> Float8Work:
    with Float8Work() as work:
        run()
    return work


FROZEN = {
    "nothing": (True, True, True),
    "weight": (True, False, True),
    "input": (False, True, True),
    "input-and-weight": (False, False, True),
    "all": (False, False, False),
}


@pytest.mark.parametrize("frozen", FROZEN, ids=list(FROZEN))
@on_each_recipe
def test_gemms_nobody_needs_are_not_run(recipe, frozen):
    need_dx, need_dw, need_db = FROZEN[frozen]
    layer = made(recipe)
    layer.weight.requires_grad_(need_dw)
    layer.bias.requires_grad_(need_db)
    x = x_of(M, K).requires_grad_(need_dx)
    expected = gradients(made(recipe), x_of(M, K))

    def run() -> None:
        y = layer(x)
        assert y.requires_grad == (need_dx or need_dw or need_db)
        if y.requires_grad:
            y.backward(dy_of(y))

    work = work_of(run)
    float8 = in_float8(recipe)
    needed = [float8[name] for name, need in (("y", True), ("dx", need_dx), ("dw", need_dw)) if need]
    assert (work.matmuls, work.plain_matmuls) == (needed.count(True), needed.count(False))
    for needed, tensor, name in (
        (need_dx, x.grad, "dx"),
        (need_dw, layer.weight.grad, "dw"),
        (need_db, layer.bias.grad, "db"),
    ):
        assert torch.equal(tensor, expected[name]) if needed else tensor is None


def test_each_tensor_is_cast_once_a_step_and_without_gradients_to_rows_alone():
    """x, w and dy, each once for both its usages where one scale serves both."""
    work = work_of(lambda: gradients(made("tensorwise"), x_of(M, K)))
    assert sorted(work.casts) == sorted([(M, K), (N, K), (M, N)])
    with torch.no_grad():
        work = work_of(lambda: made("rowwise")(x_of(M, K)))
    assert sorted(work.casts) == sorted([(M, K), (N, K)])


@pytest.mark.parametrize(
    ("frozen", "casts"), [("nothing", 2), ("weight", 1), ("input", 1), ("input-and-weight", 0)]
)
def test_dy_is_cast_for_what_is_needed_alone(frozen, casts):
    """Its rows for dx, its columns for dw."""
    need_dx, need_dw, _ = FROZEN[frozen]
    layer = made("rowwise")
    layer.weight.requires_grad_(need_dw)
    y = layer(x_of(M, K).requires_grad_(need_dx))
    work = work_of(lambda: y.backward(dy_of(y)))
    assert work.casts.count((M, N)) == casts


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float64], ids=str)
def test_an_input_of_another_kind_names_the_layer(dtype):
    model = f8sub.convert_to_float8(nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(K, N))}))
    x = torch.zeros(M, K, dtype=dtype)
    with pytest.raises(TypeError, match=rf"mlp\.0: .*{dtype}.*\({M}, {K}\)"):
        model["mlp"][0](x)


@pytest.mark.parametrize("shape", [(M, K + 1), (N,), (2, M, 1), ()], ids=str)
def test_a_wrong_feature_count_names_the_layer(shape):
    model = f8sub.convert_to_float8(nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(K, N))}))
    x = torch.zeros(shape)
    with pytest.raises(f8sub.Float8ShapeError, match=rf"mlp\.0: expected an input of shape \(\.\.\., {K}\)"):
        model["mlp"][0](x)


def test_create_graph_is_an_error_that_says_so():
    layer, x = made(), x_of(M, K)
    y = layer(x)
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(y, x, dy_of(y), create_graph=True)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev])
def test_transforms_of_torch_func_are_an_error_that_says_so(transform):
    layer = made()
    with pytest.raises(f8sub.Float8ConfigError, match=r"torch\.func.*torch\.autograd\.grad"):
        transform(lambda x: layer(x).sum())(x_of(M, K))


@pytest.mark.parametrize(
    "compiled", [lambda model: torch.jit.trace(model, x_of(M, K)), torch.jit.script], ids=["trace", "script"]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torch_jit_is_an_error_that_names_the_layer(compiled):
    """A trace holds the scales of its example as constants: another input would saturate, silently."""
    model = f8sub.convert_to_float8(nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(K, N))}))["mlp"]
    with torch.no_grad(), pytest.raises(f8sub.Float8ConfigError, match=r"mlp\.0: .*torch\.export"):
        compiled(model)


@pytest.mark.parametrize("recipe", long_but(["tensorwise", "blockwise"], f8sub.recipe_names()))
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)], ids=["", "strict"])
def test_torch_export_computes_what_the_layer_does(recipe, strict):
    """What the error of torch.jit tells to do; another input than the example has other scales."""
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(K, N)), recipe).eval()
    exported = torch.export.export(model, (x_of(M, K),), strict=strict).module()
    with torch.no_grad():
        assert equal(exported(3 * x_of(M, K)), model(3 * x_of(M, K)))


def test_a_weight_changed_between_forward_and_backward_is_an_error():
    """As in a plain linear layer: a gradient at another weight would be silently wrong."""
    layer, x = made(), x_of(M, K)
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy_of(y))


def test_x_changed_in_place_after_the_forward_does_no_harm():
    """x is saved as float8 codes, so relu_ and its like may follow."""
    layer, x = made(), x_of(M, K)
    h = x * 1.0
    y = layer(h)
    h.mul_(0)
    y.backward(dy_of(y))
    assert torch.equal(layer.weight.grad, gradients(made(), x_of(M, K))["dw"])


def block_work(recipe: str, run) -> tuple[list[torch.Tensor], Float8Work]:
    model = block(recipe)
    with Float8Work() as work:
        found = results(model, run)
    return found, work


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@on_each_recipe
def test_activation_checkpointing_is_bitwise_equal(recipe, reentrant):
    expected, plain = block_work(recipe, lambda block, x: block(x))
    found, work = block_work(recipe, lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
    assert equal(found, expected)
    gemms = sum(in_float8(recipe).values())
    assert plain.matmuls == 3 * gemms
    assert work.matmuls - plain.matmuls in (2, 3)  # the recomputation may stop before the last forward
    assert work.casts.count((N, K)) == plain.casts.count((N, K))
    if recipe == "tensorwise":
        # (M, K): x, once more in the recomputation, and the cotangent of down's output, which has x's shape.
        assert (plain.casts.count((M, K)), work.casts.count((M, K))) == (2, 3)


@on_each_recipe
def test_a_non_finite_cotangent_reaches_the_gradients(recipe):
    """What GradScaler looks for must not be clamped away."""
    layer, x = made(recipe), x_of(M, K)
    y = layer(x)
    dy = dy_of(y)
    dy[3, 4] = float("inf")
    y.backward(dy)
    assert not x.grad[3].isfinite().any()
    assert not layer.weight.grad[4].isfinite().any()
    assert x.grad[5].isfinite().all()
    assert layer.weight.grad[6].isfinite().all()
