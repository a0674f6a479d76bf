"""compare finds what float8 changes, tells it from bf16's own noise, and changes nothing."""

import copy
import math

import pytest
import torch
from torch import nn

import f8sub
from f8sub import Comparison
from f8sub.diagnostics.compare import OtherOrder
from f8sub.diagnostics.comparison import NOISE, REFERENCE, Gradient
from tests.checkpoint.models import llama
from tests.models import seed_weights

BF16 = torch.bfloat16


class Net(nn.Module):
    """Returns a loss; its dropout draws from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.norm = nn.BatchNorm1d(64)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.down(self.drop(self.up(x).relu()))).float() - target).square().mean()


def batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 32, 64, generator=generator)) for _ in range(count)]


def net() -> nn.Module:
    return seed_weights(Net())


def run_by_hand(recipe: str | None) -> tuple[list[float], nn.Module]:
    model = net()
    if recipe:
        f8sub.convert_to_float8(model, recipe)
    losses = []
    for number, batch in enumerate(batches()):
        torch.manual_seed(number)
        with torch.autocast("cpu", BF16):
            loss = model(*batch)
        loss.backward()
        losses.append(loss.item())
    return losses, model


def test_losses_and_gradients_are_those_of_runs_by_hand():
    lengths = []
    found = f8sub.compare(
        net(),
        batches(),
        ("tensorwise", f8sub.get_recipe("rowwise")),
        progress=lambda seen: lengths.append(len(seen)) or seen,
    )
    assert lengths == 4 * [3]
    assert found.runs == ["tensorwise", "rowwise"]
    exact, plain = run_by_hand(None)
    assert found.losses[REFERENCE] == exact
    for recipe in found.runs:
        losses, converted = run_by_hand(recipe)
        assert found.losses[recipe] == losses
        rows = {row.name: row for row in found.gradients if row.run == recipe}
        assert {name for name, _ in plain.named_parameters()} - rows.keys() <= {"down.bias"}  # a norm follows
        a = converted.up.weight.grad.double().flatten()
        b = plain.up.weight.grad.double().flatten()
        assert rows["up.weight"].error == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-12)
        assert rows["up.weight"].cosine == pytest.approx(float(a @ b / a.norm() / b.norm()), rel=1e-12)


def test_nothing_of_the_users_is_changed():
    model = net()
    model(*batches(1)[0]).backward()
    before, gradients = copy.deepcopy(model), [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    f8sub.compare(model, batches(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model.up) is nn.Linear
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before.buffers(), strict=True))
    for a, b, gradient in zip(model.parameters(), before.parameters(), gradients, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.grad, gradient)


def test_another_order_of_sums_is_exact_on_paper_and_noise_in_bf16():
    layer, x = nn.Linear(96, 40).double(), torch.randn(5, 7, 96, dtype=torch.float64)
    y = layer(x)
    with OtherOrder():
        other = layer(x)
    torch.testing.assert_close(other, y, rtol=1e-13, atol=1e-13)
    assert not torch.equal(other, y)
    found = f8sub.compare(net(), batches(), "tensorwise")
    noise = [row.error for row in found.gradients if row.run == NOISE and row.name.endswith("weight")]
    float8 = [row.error for row in found.gradients if row.run == "tensorwise" and row.name.endswith("weight")]
    assert 0 < max(noise) < max(float8)


def test_an_optimizer_makes_curves_and_gradients_of_the_first_batch():
    steps = lambda p: torch.optim.SGD(p, lr=0.5)  # noqa: E731
    found = f8sub.compare(net, batches(6), "rowwise", optimizer=steps)
    once = f8sub.compare(net(), batches(1), "rowwise")
    assert found.trained
    assert found.losses["rowwise"][0] == once.losses["rowwise"][0]
    assert found.gradients == once.gradients
    assert found.losses["rowwise"][-1] < found.losses["rowwise"][0]
    last = found.loss("rowwise")
    assert last.difference == found.losses["rowwise"][-1] - found.losses[REFERENCE][-1]


def test_a_transformers_model_labels_and_options():
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    mixed = {"*.mlp": "rowwise", "*": "tensorwise"}
    found = f8sub.compare(
        llama(), [{"input_ids": tokens, "labels": tokens}], {"mixed": mixed}, skip="*.k_proj"
    )
    assert found.runs == ["mixed"]
    assert len({row.name for row in found.gradients}) == 21
    assert found.loss("mixed").rms < 0.05


def test_tables_the_worst_and_the_noise_they_are_judged_by(tmp_path):
    losses = {REFERENCE: [1.0, 2.0], NOISE: [1.001, 2.001], "a": [1.01, 1.99]}
    gradients = (
        Gradient(NOISE, "w", 1.0, 0.01),
        Gradient("a", "w", 0.9, 0.2),
        Gradient("a", "<v>", 0.99, 0.1),
    )
    found = Comparison(losses, (*gradients, Gradient(NOISE, "<v>", 1.0, 0.02)), trained=False)
    judged = found.loss("a")
    assert judged.loss == 1.5
    assert judged.difference == 0
    assert judged.rms == pytest.approx(0.01)
    assert judged.times_noise == pytest.approx(10)
    assert [row.name for row in found.worst()] == ["w", "<v>"]
    assert [row.name for row in found.worst(1, NOISE)] == ["<v>"]
    assert "1.50000   +0.00e+00  1.00e-02     10.0        0.99000" in str(found)
    assert "20.00%" in str(found)
    exact = Comparison({REFERENCE: [1.0], NOISE: [1.0], "a": [1.1]}, (), trained=True)
    assert math.isinf(exact.loss("a").times_noise)
    pytest.importorskip("matplotlib")
    page = found.save(tmp_path / "page")
    assert sorted(path.name for path in page.parent.iterdir()) == ["gradients.png", "index.html", "loss.png"]
    assert "&lt;v&gt;" in page.read_text()
    assert (tmp_path / "page" / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_what_cannot_be_compared():
    def raises(words: str, model=None, given=None, **options) -> None:
        with pytest.raises(f8sub.Float8ConfigError, match=words):
            f8sub.compare(model or net(), batches() if given is None else given, **options)

    raises("is converted already", f8sub.convert_to_float8(net()))
    raises("without parameters, which has no gradients", nn.ReLU(), [torch.ones(2, 64)])
    raises("was given no batches;", given=[])
    raises("was given no batches but a dict; give a list", given={"x": torch.ones(2, 64)})
    raises("was given no batches but a int", given=3)
    raises("returned no loss but shape", nn.Linear(64, 64), [torch.ones(2, 64)])
    raises("the loss has no gradient", net().requires_grad_(False))
    raises("returned float", loss_of=lambda model, batch: 1.0)
    raises(r"returned \(32, 64\)", loss_of=lambda model, batch: model.down(model.up(batch[0])))
    raises("is the label of a run without float8", recipes={"bf16": "rowwise"})


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    found = Comparison({REFERENCE: [1.0], NOISE: [1.0]}, (), trained=False)
    with pytest.raises(f8sub.Float8ConfigError, match="drawn with matplotlib, which is not installed"):
        found.save(tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_a_run_that_there_is_not():
    found = Comparison({REFERENCE: [1.0], NOISE: [1.0], "rowwise": [1.0]}, (), trained=False)
    for ask in (found.loss, lambda run: found.worst(8, run)):
        with pytest.raises(f8sub.Float8ConfigError, match=r"no run is called 'row'; there is .*'rowwise'"):
            ask("row")
