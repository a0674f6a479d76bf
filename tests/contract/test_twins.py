"""Linear layers and experts are two copies of one behaviour: each feature holds for both, or says that it does not."""

import copy
import io
import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

import f8sub
from f8sub.diagnostics.bytes import byte_account
from f8sub.estimator import experts as estimated
from f8sub.experts.module import Float8Experts
from tests.data_sets import gaussian, generator
from tests.experts.models import OwnExperts, experts_of, of_transformers
from tests.experts.ranks.test_experts_sharded import TransposedExperts
from tests.models import equal, heard, refusal, seed_weights
from tests.selection import long_but

WIDTH, ROWS, EXPERTS = 32, 24, 4
ENDS = torch.tensor([6, 6, 20, ROWS])


class Model(nn.Module):
    """One module of a form, called with tokens alone."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer, x)


class ReplacedExperts(OwnExperts):
    """Its own forward knows nothing of float8; another one runs once it is converted."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        starts = [0, *ends.tolist()[:-1]]
        parts = []
        for index, (start, end) in enumerate(zip(starts, ends.tolist(), strict=True)):
            part = x[start:end]
            h = nn.functional.silu(part @ self.gate[index].t()) * (part @ self.up[index].t())
            parts.append(h @ self.down[index].t())
        return torch.cat(parts)


class SeamedExperts(nn.Module):
    """Products by a method that is given the transposed weight, as torchtitan's are."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        for name, weight in OwnExperts(experts, width, hidden).named_parameters():
            setattr(self, name, weight)

    def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return nn.functional.grouped_mm(A, B_t, offs=offs.int())

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        h = nn.functional.silu(self._grouped_mm(A=x, B_t=self.gate.transpose(-2, -1), offs=ends))
        h = h * self._grouped_mm(A=x, B_t=self.up.transpose(-2, -1), offs=ends)
        return self._grouped_mm(A=h, B_t=self.down.transpose(-2, -1), offs=ends)


def _forward(module: nn.Module, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return OwnExperts.forward(module, x, ends)


f8sub.register_experts(OwnExperts)
f8sub.register_experts(TransposedExperts, transposed=True)
f8sub.register_experts(ReplacedExperts, forward=_forward)


def _in_groups(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x, ENDS)


def _routed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    index = torch.arange(2 * len(x)).view(-1, 2) % module.num_experts
    return module(x, index, torch.full((len(x), 2), 0.5))


def _of_transformers() -> nn.Module:
    return experts_of(of_transformers("qwen3_moe").float())[0]


ASKED: dict[str, Any] = {"experts": True}
"""How experts are asked for."""


class Form(NamedTuple):
    """A kind of module, how it is called, its weights' names, and how deep it multiplies."""

    make: Callable[[], nn.Module]
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    weights: tuple[str, ...]

    def plain(self) -> Model:
        return Model(self.make(), self.call)

    def converted(self, recipe: Any = "rowwise", **options: Any) -> Model:
        return f8sub.convert_to_float8(self.plain(), recipe, skip_defaults=False, **ASKED, **options)

    @property
    def is_linear(self) -> bool:
        return self.weights == ("weight",)

    @property
    def rows(self) -> set[str]:
        """The names of its products."""
        return {"layer"} if self.is_linear else {f"layer.{name}" for name in self.weights}


FORMS = {
    "linear": Form(
        lambda: seed_weights(nn.Linear(WIDTH, WIDTH, bias=False)), lambda layer, x: layer(x), ("weight",)
    ),
    "grouped_linear": Form(lambda: OwnExperts(EXPERTS, WIDTH, 48), _in_groups, ("gate", "up", "down")),
    "transposed": Form(lambda: TransposedExperts(EXPERTS, WIDTH, 48), _in_groups, ("up", "down")),
    "_grouped_mm": Form(lambda: SeamedExperts(EXPERTS, WIDTH, 48), _in_groups, ("gate", "up", "down")),
    "replaced forward": Form(lambda: ReplacedExperts(EXPERTS, WIDTH, 48), _in_groups, ("gate", "up", "down")),
    "transformers": Form(_of_transformers, _routed, ("gate_up_proj", "down_proj")),
}


def x_of(seed: int = 1) -> torch.Tensor:
    return gaussian((ROWS, WIDTH), generator(seed)).requires_grad_()


def results(model: nn.Module, around: Any = None) -> list[torch.Tensor]:
    """y and all gradients; backward is outside of what is ``around`` the forward."""
    model.zero_grad()
    x = x_of()
    with around or f8sub.autocast():
        y = model(x)
    y.backward(gaussian(tuple(y.shape), generator(2)))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def autocast(form: Form) -> None:
    """In a context a module computes what one that was converted with the context's recipe does."""
    expected = results(form.converted("tensorwise"))
    assert equal(results(form.converted(), f8sub.autocast("tensorwise")), expected)
    assert equal(results(form.converted("tensorwise"), f8sub.autocast()), expected)
    high = results(form.converted(), f8sub.autocast(enabled=False))
    for a, b in zip(high, results(form.plain()), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
    model = form.converted()
    with f8sub.autocast("tensorwise"):
        repeated = checkpoint(model, x := x_of(), use_reentrant=False)
    repeated.backward(gaussian(tuple(repeated.shape), generator(2)))
    assert equal([repeated, x.grad, *(p.grad for p in model.parameters())], expected)


def find_nonfinite(form: Form) -> None:
    """The first NaN is named: x, a weight, dy; converted or not."""
    for make in (form.converted, form.plain):
        model, x = make(), x_of().detach()
        x[3, 5] = torch.nan
        with f8sub.find_nonfinite(model) as search:
            model(x)
        assert search.first is not None
        assert search.first.role == "x"
        assert search.first.layer.startswith("layer")
        model = make()
        weight = getattr(model.layer, form.weights[-1])
        with torch.no_grad():
            weight.view(-1)[3] = torch.nan
        with f8sub.find_nonfinite(model) as search:
            model(x_of())
        assert str(search).startswith("w of layer")
        model = make()
        with f8sub.find_nonfinite(model) as search:
            y = model(x_of())
            y.backward(torch.full_like(y, torch.nan))
        assert search.first is not None
        assert (search.first.role, search.first.layer[:5]) == ("dy", "layer")
        with f8sub.find_nonfinite(make()) as search:
            results(make())
        assert search.first is None


def monitor(form: Form) -> None:
    """Rows of x, w and dy of each product, in the context's recipe where there is one."""
    for recipe in ("rowwise", "nvfp4"):
        model = form.converted(recipe)
        with f8sub.Monitor(model, every=1) as watch:
            results(model)
        watch.flush()
        assert {(row.layer, row.role) for row in watch.rows} == {
            (name, role) for name in form.rows for role in ("x", "w", "dy")
        }


def sensitivity(form: Form) -> None:
    for recipe in ("rowwise", "nvfp4"):
        found = f8sub.sensitivity(form.converted(recipe), lambda model: model(x_of()).square().mean())
        assert [row.fqn for row in found.layers] == ["layer"]
        assert found.layers[0].harm > 0


def compare(form: Form) -> None:
    batch, options = [x_of().detach()], {**ASKED, "skip_defaults": False}
    loss_of = lambda model, x: model(x).square().mean()  # noqa: E731
    found = f8sub.compare(form.plain(), batch, "rowwise", loss_of=loss_of, **options)
    assert set(found.losses) > {"rowwise"}
    message = refusal(f8sub.Float8ConfigError, f8sub.compare, form.converted(), batch)
    assert "converted already" in message


def convert_back(form: Form) -> None:
    model = form.converted()
    kind = type(form.make())
    f8sub.convert_from_float8(model)
    assert type(model.layer) is kind
    assert equal(results(model), results(form.plain()))


def delayed(form: Form) -> None:
    """Histories are in the state dict, and roll when an optimizer steps."""
    model = form.converted(f8sub.get_recipe("delayed", amax_history_len=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        results(model)
        optimizer.step()
        f8sub.precompute_scales(model)
    saved = [name for name in model.state_dict() if "scaling_states" in name]
    assert len({name.split("scaling_states")[0] for name in saved}) == len(form.weights)
    other = form.converted(f8sub.get_recipe("delayed", amax_history_len=4))
    other.load_state_dict(model.state_dict())
    assert equal(results(other), results(model))


def primary_weights(form: Form) -> None:
    """Codes in the weights' place, which an optimizer steps; the report says it; not with scales of the past."""
    model = form.converted("tensorwise", primary_weights=True)
    optimizer = f8sub.optim.MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    assert all("Primary" in type(getattr(model.layer, name)).__name__ for name in form.weights)
    assert "primary weight" in repr(model)
    before = model(x_of()).detach()
    results(model)
    optimizer.step()
    f8sub.precompute_scales(model)
    assert not equal(model(x_of()).detach(), before)
    message = refusal(f8sub.Float8ConfigError, lambda: form.converted("delayed", primary_weights=True))
    assert "scales them by their past" in message


def keep_x(form: Form) -> None:
    """An option of linear layers; a pattern that names experts is told to decide nothing."""
    with heard() as told:
        model = form.converted(keep_x={"layer": "high_precision"})
    if form.is_linear:
        assert model.layer._f8sub.keep_x == "high_precision"
    else:
        assert "patterns of keep_x that decide for no layer: 'layer' matches no linear layer" in told[0]


def skip(form: Form) -> None:
    for options in ({"skip": "layer"}, {"filter_fn": lambda module, fqn: False}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = form.converted(strict=False, **options)
        assert type(model.layer) is type(form.make())
        assert "layer" in str(f8sub.conversion_report(model))
    model = form.converted({"layer": "tensorwise"})
    assert equal(results(model), results(form.converted("tensorwise")))


def report(form: Form) -> None:
    found = f8sub.conversion_report(form.converted())
    assert found.flops_share == 1.0
    assert "rowwise" in str(found)


def export(form: Form) -> None:
    """Codes of every matrix, or a refusal where checkpoints keep experts in one tensor, which engines read so."""
    model = form.converted("blockwise")
    if all(model.layer._f8sub.weights.values()) and not form.is_linear:
        assert "no codes to export" in refusal(f8sub.Float8ConfigError, f8sub.float8_state_dict, model)
        return
    found, _ = f8sub.float8_state_dict(model, dtype=torch.float32)
    codes = [name for name, tensor in found.items() if tensor.dtype is torch.float8_e4m3fn]
    matrices = 1 if form.is_linear else sum(getattr(model.layer, name).shape[0] for name in form.weights)
    assert len(codes) >= matrices


def non_finite_weights(form: Form) -> None:
    """NaN in a weight is an error that names it."""
    model = form.converted()
    with torch.no_grad():
        getattr(model.layer, form.weights[-1]).view(-1)[3] = torch.nan
    y = model(x_of())
    assert y.isnan().any()
    with f8sub.find_nonfinite(model) as search:
        model(x_of())
    assert search.first is not None


def step_guard(form: Form) -> None:
    model = form.converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = f8sub.skip_step_if_nonfinite(optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(x_of()).sum().mul(torch.inf).backward()
    optimizer.step()
    assert int(guard.skipped) == 1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def bytes_of(form: Form) -> None:
    model = form.converted()
    found = byte_account(model, tokens=ROWS).layers
    assert {each.fqn for each in found} == form.rows
    assert all("rowwise" in each.kind for each in found)


def copies(form: Form) -> None:
    """Deep copies and pickles have the same results, and a conversion of their own."""
    model = form.converted()
    expected = results(model)
    file = io.BytesIO()
    torch.save(nn.Sequential(model.layer), file)
    file.seek(0)
    (stored,) = torch.load(file, weights_only=False)
    copied = copy.deepcopy(model)
    for other in (copied, Model(stored, form.call)):
        assert getattr(other.layer, form.weights[0]).record.module is other.layer
        assert equal(results(other), expected)
        assert other.layer._f8sub.conversion is not model.layer._f8sub.conversion
    state = model.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    assert list(state) == list(form.plain().state_dict())


def loaded(form: Form) -> None:
    """Training goes on from what was loaded; a weight that is not replaced stays what an optimizer has."""
    for primary, assign in itertools.product((False, True), repeat=2):
        model, expected = form.converted("tensorwise", primary_weights=primary), form.converted("tensorwise")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if primary:
            optimizer = f8sub.optim.MasterWeights(optimizer)
        values = {n: gaussian(tuple(v.shape), generator(9)) / 8 for n, v in model.state_dict().items()}
        weight = getattr(model.layer, form.weights[0])
        model.load_state_dict({name: value.clone() for name, value in values.items()}, assign=assign)
        if primary or not assign:
            assert getattr(model.layer, form.weights[0]) is weight
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        expected.load_state_dict(values)
        other = torch.optim.SGD(expected.parameters(), lr=0.1)
        for _ in range(2):
            assert equal([results(model)[0]], [results(expected)[0]])
            optimizer.step()
            other.step()


def jit(form: Form) -> None:
    model = form.converted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for how in (lambda: torch.jit.script(model.layer), lambda: torch.jit.trace(model, x_of().detach())):
            assert "by torch.jit" in refusal(f8sub.Float8ConfigError, how)


def checkpointing(form: Form) -> None:
    expected = results(form.converted())
    for how in ({"use_reentrant": True}, {"use_reentrant": False}):
        model = form.converted()
        y = checkpoint(model, x := x_of(), **how)
        y.backward(gaussian(tuple(y.shape), generator(2)))
        assert equal([y, x.grad, *(p.grad for p in model.parameters())], expected)


def swiglu_input(form: Form) -> None:
    """An option of linear layers; a model that has none is refused."""
    model = form.converted()
    if form.is_linear:
        assert f8sub.keep_swiglu_input_in_float8(model, ["layer"]) == ["layer"]
    else:
        message = refusal(f8sub.Float8ConfigError, f8sub.keep_swiglu_input_in_float8, model)
        assert message.startswith("no linear layer is called")


def estimate(form: Form) -> None:
    """Bytes on the wire are those of codes, of a model that is converted or is to be."""
    for model in (form.plain(), form.converted()):
        assert "rowwise" in str(f8sub.estimate(model, "rowwise", gpus="H200", **ASKED))


MAKERS: tuple[Callable[[nn.Module, str], object], ...] = (
    lambda module, name: None,
    lambda module, name: nn.utils.parametrizations.weight_norm(module, name),
    lambda module, name: parametrize.register_parametrization(module, name, nn.Identity()),
    lambda module, name: prune.l1_unstructured(module, name, 0.3),
)
"""What computes a weight after a conversion."""


def account(form: Form) -> None:
    """Estimates, reports and bytes have the products that a conversion converts, whatever computes a weight since."""

    def products(model: nn.Module) -> dict[str, tuple[object, ...]]:
        found = f8sub.estimate(model, "rowwise", gpus="H200", **ASKED).shapes
        return {p.fqn: (p.rows, p.cols, p.uses, p.elements, p.transposed, p.reads) for p in found.products}

    expected, plain = products(form.plain()), f8sub.conversion_report(form.plain())
    assert expected.keys() == form.rows
    for make in MAKERS:
        model = form.converted()
        make(model.layer, form.weights[-1])
        assert products(model) == expected
        assert {each.fqn for each in f8sub.conversion_report(model, tokens=ROWS).bytes.layers} == form.rows
        reports = [f8sub.conversion_report(model)]
        if not parametrize.is_parametrized(model.layer):  # whose copy would not compute the weight
            reports.append(f8sub.conversion_report(model, batch=x_of().detach()))
        for report in reports:
            assert report.flops_share == 1
            assert [each.shapes for each in report.others] == [each.shapes for each in plain.others]
            assert "register_experts" not in str(report)


def parametrized(form: Form) -> None:
    """As the plain module has it, see tests/convert/test_parametrized.py."""
    name = form.weights[-1]
    found = []
    for model in (form.converted(), form.plain()):
        alive = model(x_of())
        prune.l1_unstructured(model.layer, name, 0.3)
        found.append((results(model), list(model.state_dict())))
        del alive
    (float8, names), (plain, plain_names) = found
    assert names == plain_names
    for a, b in zip(float8, plain, strict=True):
        assert (a - b).norm() <= 0.15 * b.norm()


def another_device(form: Form) -> None:
    """A plan that was made for another device is made anew at the first call there."""
    with torch.device("meta"):
        model = form.plain()
    f8sub.convert_to_float8(model, "rowwise", skip_defaults=False, **ASKED)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), form.plain().parameters(), strict=True):
            parameter.copy_(value)
    assert equal(results(model), results(form.converted()))


FEATURES = [
    autocast,
    find_nonfinite,
    monitor,
    sensitivity,
    compare,
    convert_back,
    delayed,
    primary_weights,
    keep_x,
    skip,
    report,
    export,
    non_finite_weights,
    step_guard,
    bytes_of,
    copies,
    loaded,
    jit,
    checkpointing,
    swiglu_input,
    estimate,
    account,
    parametrized,
    another_device,
]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_a_feature_holds_for_both(feature, form):
    feature(form)


@pytest.mark.parametrize(
    "form", long_but(["_grouped_mm", "transformers"], [name for name in FORMS if name != "linear"])
)
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_a_feature_holds_for_experts_that_the_default_converts(feature, form, monkeypatch):
    """With a number of tokens that is not known, of which one is enough."""
    monkeypatch.delitem(ASKED, "experts")
    monkeypatch.setattr(
        estimated,
        "gain_of",
        lambda products, recipe, gpu, tokens, **how: estimated.ExpertGain(
            recipe.name, gpu.name, None, 2.0, 1, 1
        ),
    )
    assert isinstance(FORMS[form].converted().layer, Float8Experts)
    feature(FORMS[form])


def test_features_leave_experts_that_the_default_leaves():
    """In high precision beside a converted layer: no rows, no codes, and NaN in them is found."""
    model = nn.Sequential(seed_weights(nn.Linear(WIDTH, WIDTH)), FORMS["grouped_linear"].plain())
    plain = copy.deepcopy(model)
    f8sub.convert_to_float8(model, "rowwise", skip_defaults=False)
    experts = model[1].layer
    assert type(experts) is OwnExperts
    with f8sub.Monitor(model, every=1) as watch:
        results(model)
    watch.flush()
    assert {row.layer for row in watch.rows} == {"0"}
    found = f8sub.sensitivity(model, lambda model: model(x_of()).square().mean())
    assert [row.fqn for row in found.layers] == ["0"]
    exported, _ = f8sub.float8_state_dict(model, dtype=torch.float32)
    assert {name for name, value in exported.items() if value.dtype is torch.float8_e4m3fn} == {"0.weight"}
    assert list(model.state_dict()) == list(plain.state_dict())
    high = results(model, f8sub.autocast(enabled=False))
    assert equal(high, results(f8sub.convert_from_float8(copy.deepcopy(model)))) or equal(
        high, results(plain)
    )
    with torch.no_grad():
        experts.down.view(-1)[3] = torch.nan
    with f8sub.find_nonfinite(model) as search:
        model(x_of())
    assert str(search).startswith("w of 1.layer")
