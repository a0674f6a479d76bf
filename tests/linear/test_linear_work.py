"""Float8Linear computes nothing it need not, names itself when it refuses, and recomputes bitwise."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import f8sub
from tests.counting import Float8Work
from tests.data_sets import gaussian, generator
from tests.layers import K, M, N, dy_of, gradients, in_float8, made, x_of
from tests.models import Block, seed_weights

RECIPES = f8sub.recipe_names()
on_each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)


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


def test_each_tensor_is_cast_once_a_step():
    """x, w and dy, each once for both its usages: one scale serves both."""
    layer = made("tensorwise")
    work = work_of(lambda: gradients(layer, x_of(M, K)))
    assert sorted(work.casts) == sorted([(M, K), (N, K), (M, N)])


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


def test_no_grad_casts_no_columns():
    layer = made("rowwise")
    with torch.no_grad():
        work = work_of(lambda: layer(gaussian((M, K), generator(1))))
    assert sorted(work.casts) == sorted([(M, K), (N, K)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
def test_an_input_that_is_not_floating_point_names_the_layer(dtype):
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


def test_a_float64_input_is_computed_or_refused_by_name():
    """nn.Linear refuses a dtype that is not its weight's; a silent loss of precision would be the worst."""
    layer = made()
    x = gaussian((M, K), generator(1)).double()
    with pytest.raises((TypeError, f8sub.Float8ConfigError), match=r"0: .*float64"):
        layer(x)


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


def test_backward_twice_is_autograds_own_error():
    layer, x = made(), x_of(M, K)
    y = layer(x)
    y.backward(dy_of(y), retain_graph=True)
    first = x.grad.clone()
    y.backward(dy_of(y))
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(dy_of(y))


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


class Shared(nn.Module):
    """Two siblings that share one x, and a block around them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(K, N), nn.Linear(K, N), nn.Linear(N, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def block_results(recipe: str, run) -> tuple[list[torch.Tensor], Float8Work]:
    block = f8sub.convert_to_float8(seed_weights(Shared()), recipe=recipe)
    x = x_of(M, K)
    with Float8Work() as work:
        y = run(block, x)
        y.backward(dy_of(y))
    return [y.detach(), x.grad, *(p.grad for p in block.parameters())], work


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@on_each_recipe
def test_activation_checkpointing_is_bitwise_equal(recipe, reentrant):
    expected, plain = block_results(recipe, lambda block, x: block(x))
    found, work = block_results(recipe, lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    gemms = sum(in_float8(recipe).values())
    assert plain.matmuls == 3 * gemms
    assert work.matmuls - plain.matmuls in (2, 3)  # the recomputation may stop before the last forward
    assert work.casts.count((N, K)) == plain.casts.count((N, K))


def test_a_recomputed_forward_casts_a_shared_x_once():
    """Tensorwise: x in the forward, x in the recomputation, dx's cotangent of down: one cast each."""
    _, plain = block_results("tensorwise", lambda block, x: block(x))
    _, work = block_results("tensorwise", lambda block, x: checkpoint(block, x, use_reentrant=False))
    # (M, K): x, and the cotangent of down's output, which has x's shape.
    assert plain.casts.count((M, K)) == 2
    assert work.casts.count((M, K)) == 3


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_under_autocast(reentrant):
    def run(block, x):
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(block, x, use_reentrant=reentrant)

    def plain(block, x):
        with torch.autocast("cpu", torch.bfloat16):
            return block(x)

    found, _ = block_results("tensorwise", run)
    expected, _ = block_results("tensorwise", plain)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@on_each_recipe
def test_grad_scaler(recipe):
    """A power-of-two loss scale leaves every gradient what it was; an overflow skips the step."""
    torch.manual_seed(0)
    weights = []
    for scale in (1.0, 2.0**10):
        model = f8sub.convert_to_float8(seed_weights(Block(32, 48)), recipe=recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        x = x_of(2, 8, 32)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        weights.append([torch.zeros_like(p.detach()) + p.detach() for p in model.parameters()])
    for one, other in zip(*weights, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(x).float().pow(2).mean() * torch.tensor(float("inf"))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


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
