"""Experts in what sensitivity tells: their module's row, by what each expert's own layer would tell."""

import pytest
import torch

import f8sub
from tests.data_sets import gaussian, generator
from tests.diagnostics.test_experts import ENDS, HIDDEN, WIDTH_OF_X
from tests.experts.models import of_transformers


def harm_of(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, recipe: str) -> float:
    x8, w8 = (f8sub.quantize(t, recipe, o, columnwise=False).dequantize() for t, o in ((x, "x"), (w, "w")))
    error = x8.double() @ w8.double().t() - x.double() @ w.double().t()
    return (error * dy.double()).square().sum().item()


class OneProduct(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(gaussian((len(ENDS), HIDDEN, WIDTH_OF_X), generator(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return f8sub.grouped_linear(x, self.w, ENDS)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "nvfp4"])
def test_harm_is_the_sum_of_the_experts_own(recipe):
    f8sub.register_experts(OneProduct)
    model = torch.nn.Sequential(OneProduct())
    weights = model[0].w.detach().clone()
    f8sub.convert_to_float8(model, recipe, experts=True)
    plan = model[0]._f8sub.plan
    x, dy = gaussian((48, WIDTH_OF_X), generator(0)), gaussian((48, HIDDEN), generator(1))
    found = f8sub.sensitivity(model, lambda model: (model(x) * dy).sum())
    parts = [slice(a, b) for a, b in zip([0, *ENDS.tolist()], ENDS.tolist(), strict=False) if b > a]
    used = [
        w for w, begin, end in zip(weights, [0, *ENDS.tolist()], ENDS.tolist(), strict=False) if end > begin
    ]
    right = sum(harm_of(x[part], w, dy[part], recipe) for part, w in zip(parts, used, strict=True))
    assert [(row.fqn, row.flops) for row in found.layers] == [("0", 1.0)]
    assert found.layers[0].harm == pytest.approx(right**0.5, rel=1e-3)
    assert model[0]._f8sub.plan is plan


def test_outliers_of_experts_are_told_and_nothing_changes():
    tokens = torch.randint(0, 64, (2, 16), generator=generator(0))
    harms = []
    for outliers in (False, True):
        model = of_transformers("qwen3_moe").float()
        (experts,) = (module for fqn, module in model.named_modules() if fqn.endswith(".experts"))
        with torch.no_grad():
            experts.down_proj[:, :, 3] = 0  # what this row of w1 makes reaches no loss
            experts.gate_up_proj[:, 3] *= 1e5 if outliers else 1.0  # the other rows are rounded to nothing
        f8sub.convert_to_float8(model, "tensorwise", experts=True, skip_defaults=False)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        found, again = (f8sub.sensitivity(model, lambda m: m(tokens, labels=tokens).loss) for _ in range(2))
        assert found == again
        assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())
        assert len(found.layers) > 4
        assert sum(row.flops for row in found.layers) == pytest.approx(1.0)
        harms += [row.harm for row in found.layers if row.fqn.endswith(".experts")]
    assert harms[1] > 5 * harms[0] > 0
