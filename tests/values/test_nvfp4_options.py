"""The options of nvfp4: stochastic rounding of dy, and a random Hadamard transform of both operands of wgrad."""

import numpy as np
import pytest
import torch

import f8sub
from f8sub.kernels import reference
from tests import oracle
from tests.budgets import decibels, excess, gamma
from tests.compiling import compile_blocks, differences, mlps, train
from tests.contract.test_linear_numerics import converted, step
from tests.data_sets import make

OPTIONS = {
    "stochastic": {"stochastic_rounding": True},
    "hadamard": {"hadamard": True},
    "both": {"stochastic_rounding": True, "hadamard": True},
}
on_each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


def gradients(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, **options) -> tuple[torch.Tensor, ...]:
    results = step(converted(f8sub.get_recipe("nvfp4", **options), w), x, dy)
    return results["dx"], results["dw"]


@pytest.mark.parametrize("rows", [1, 13, 16, 40], ids=str)
def test_the_transform_cancels_in_wgrad_for_any_number_of_rows(rows):
    """dw is the product of what the rotated codes stand for rotated back; y and dx do not know of it."""
    x, w, dy = make("gaussian", (rows, 48), 1), make("gaussian", (32, 48), 2), make("gaussian", (rows, 32), 3)
    dx, dw = gradients(x, w, dy, hadamard=True)
    spec = f8sub.get_recipe("nvfp4", hadamard=True).wgrad
    columns = (reference.quantize(t, None, format)[1] for t, format in ((dy, spec.a), (x, spec.b)))
    dy_col, x_col = (reference.dequantize(each, torch.float32).double().numpy() for each in columns)
    product = dy_col @ x_col.T
    # A rotation keeps the norms of rows, which bound a sum of products; rotating 16 numbers back rounds 17 times.
    norms = np.linalg.norm(dy_col, axis=1)[:, None] * np.linalg.norm(x_col, axis=1)
    assert (np.abs(dw.double().numpy() - product) <= (gamma(rows + 20) + 8 * gamma(17)) * norms).all()
    assert excess(dx, oracle.linear("nvfp4", x, w, dy)["dx"]) <= 1
    assert decibels(dy.double().t() @ x.double(), dw) > 12


def test_stochastic_gradients_average_to_better_ones():
    """The mean of 64 has 7 dB less noise; rounding to the nearest gives the same gradient every time."""
    x, w, dy = make("gaussian", (64, 48), 1), make("gaussian", (32, 48), 2), make("gaussian", (64, 32), 3)
    quantized = f8sub.quantize(w, "nvfp4", "w").dequantize().double()
    exact = dy.double() @ quantized
    torch.manual_seed(0)
    draws = torch.stack([gradients(x, w, dy, stochastic_rounding=True)[0] for _ in range(64)])
    nearest = gradients(x, w, dy)[0]
    assert torch.equal(gradients(x, w, dy)[0], nearest)
    assert decibels(exact, draws.mean(0)) > decibels(exact, nearest) + 5
    assert decibels(exact, draws[0]) < decibels(exact, nearest)


@on_each_option
def test_compiled_training_is_eager_training_bitwise(options):
    """The draws too: the same seed gives the same, in the same order."""
    recipe, runs = f8sub.get_recipe("nvfp4", **options), []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = f8sub.convert_to_float8(mlps(None), recipe=recipe)
        torch.manual_seed(5)
        runs.append(train(compile_blocks(model) if compiled else model))
    assert differences(runs[1], runs[0]) == []
    assert differences(train(f8sub.convert_to_float8(mlps(None), recipe="nvfp4")), runs[0]) != []
