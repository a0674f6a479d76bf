"""Experts are in float8 by default where they gain, and nowhere else; what is left says why."""

import tomllib
import types
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import f8sub
from f8sub.convert import convert as conversions
from f8sub.convert import experts as choice
from f8sub.estimator import experts as estimated
from f8sub.estimator.experts import LEAST, ExpertGain, gain_of
from f8sub.estimator.gpus import GPUS
from f8sub.experts.module import Float8Experts
from f8sub.experts.seams import AUTO_EXCHANGED, AUTO_EXPERTS
from f8sub.kernels.gemm.select import Plan
from tests.data_sets import gaussian, generator
from tests.experts.models import OwnExperts
from tests.experts.test_auto import KINDS, on_meta, weights
from tests.models import heard

ENOUGH, GATHERED = 8, 4
"""Tokens per expert that the experts of these tests need."""
WIDTH, EXPERTS = 32, 2


class Model(nn.Module):
    """A linear layer and experts of a user's own, whose tokens are divided evenly."""

    def __init__(self, experts: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = experts or OwnExperts(EXPERTS, WIDTH, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = len(x) // EXPERTS
        return self.experts(self.linear(x), torch.tensor([each, 2 * each]))


@pytest.fixture
def gaining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small experts are predicted to gain from ``ENOUGH`` tokens each."""
    f8sub.register_experts(OwnExperts)

    def predicted(products: Any, recipe: Any, gpu: Any, tokens: float | None, **how: Any) -> ExpertGain:
        each = None if tokens is None else tokens / EXPERTS
        enough = GATHERED if how["gathered"] else ENOUGH
        speedup = 1.2 if (each or enough) >= enough else 0.9
        return ExpertGain(recipe.name, gpu.name, each, speedup, ENOUGH, GATHERED, **how)

    monkeypatch.setattr(estimated, "gain_of", predicted)


def converted(model: nn.Module, **options: Any) -> Any:
    return f8sub.convert_to_float8(model, "rowwise", skip_defaults=False, **options)


def reason_of(model: nn.Module) -> str:
    (other,) = f8sub.conversion_report(model).others
    assert not other.converted
    return other.reason


def trained(model: nn.Module, tokens: int) -> list[str]:
    """The warnings of a forward and backward."""
    with heard() as told:
        model(gaussian((tokens, WIDTH), generator(tokens))).square().mean().backward()
    return [message for message in told if "tokens each" in message]


def test_experts_that_gain_are_converted_and_others_are_named_in_the_first_line():
    mixtral = f8sub.convert_to_float8(on_meta("mixtral"), tokens=65536)
    assert all(isinstance(layer.mlp.experts, Float8Experts) for layer in mixtral.model.layers)
    narrow = f8sub.convert_to_float8(on_meta("qwen3_moe"), "rowwise", tokens=16384)
    assert not any(isinstance(module, Float8Experts) for module in narrow.modules())
    first = str(f8sub.conversion_report(narrow)).splitlines()[0]
    assert "; experts: 2 modules stay in high precision: " in first
    assert "with 1,024 tokens per expert (H200); 6,030 tokens per expert are enough, 3,845 where" in first


@pytest.mark.usefixtures("gaining")
@pytest.mark.parametrize(("tokens", "warned"), [(ENOUGH * EXPERTS, []), (ENOUGH * EXPERTS - 2, ["7"])])
def test_the_first_forward_says_that_it_has_too_few_tokens_once(tokens, warned):
    model = converted(nn.Sequential(Model(), Model()))
    with torch.no_grad():
        assert trained_without_gradients(model) == []
    told = trained(model, tokens)
    assert [message.partition(" tokens each")[0] for message in told] == [f"experts have {n}" for n in warned]
    assert all(f"rowwise gains from {ENOUGH:,} on (H200)" in message for message in told)
    assert trained(model, 2) == []


def trained_without_gradients(model: nn.Module) -> list[str]:
    with heard() as told:
        model(gaussian((2, WIDTH), generator(0)))
    return told


@pytest.mark.long
@pytest.mark.usefixtures("gaining")
def test_compiled_code_says_it_too():
    model = converted(nn.Sequential(Model()))
    assert trained(torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False), 6)
    enough = converted(nn.Sequential(Model()))
    compiled = torch.compile(enough, backend="aot_eager", fullgraph=True)
    # Later numbers of tokens are dynamic, which traced code does not look at.
    assert [trained(compiled, tokens) for tokens in (2 * ENOUGH, 4 * ENOUGH, 6)] == [[], [], []]


@pytest.mark.usefixtures("gaining")
@pytest.mark.parametrize("options", [{"tokens": 64}, {"experts": True}])
def test_nothing_is_compared_where_the_tokens_were_given_or_experts_were_asked_for(options):
    model = converted(Model(), **options)
    assert isinstance(model.experts, Float8Experts)
    assert "gains from" not in repr(model)
    assert trained(model, 2) == []


@pytest.mark.usefixtures("gaining")
def test_how_many_tokens_are_needed_is_in_repr_and_report():
    model = converted(Model())
    words = f"gains from {ENOUGH:,} tokens per expert, {GATHERED:,} where FSDP2 gathers float8 data (H200)"
    assert words in repr(model.experts)
    assert words in f8sub.conversion_report(model).summary


def test_no_tokens_are_asked_for_where_no_number_is_enough():
    f8sub.register_experts(OwnExperts)
    with torch.device("meta"):
        small = nn.Sequential(OwnExperts(8, 1024, 384), nn.Linear(512, 512))
    f8sub.convert_to_float8(small, "rowwise")
    said = f8sub.conversion_report(small).summary
    assert "at any number of tokens" in said
    assert estimated.NO_TOKENS not in said


def test_tokens_per_expert_are_not_known_where_nothing_says_how_many_experts_a_token_has():
    """Every expert would be taken to have all of them."""
    f8sub.register_experts(OwnExperts)
    with torch.device("meta"):
        model = nn.Sequential(OwnExperts(8, 4096, 2048))
    f8sub.convert_to_float8(model, "rowwise", tokens=4096)
    assert "gains from" in repr(model)
    with torch.device("meta"):
        small = nn.Sequential(OwnExperts(8, 1024, 384), nn.Linear(512, 512))
    f8sub.convert_to_float8(small, "rowwise", tokens=2**20)
    assert "nothing says how many experts a token is sent to" in reason_of(small)


@pytest.mark.usefixtures("gaining")
def test_experts_that_cannot_be_converted_stay_and_are_no_error():
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(EXPERTS, WIDTH, WIDTH))

    assert "f8sub.register_experts lets them be converted" in reason_of(converted(Model(Unknown())))
    replaced = Model()
    replaced.experts.forward = replaced.experts.forward
    assert "something replaced the forward" in reason_of(converted(replaced))
    assert "multiples of 16" in reason_of(converted(Model(OwnExperts(EXPERTS, WIDTH, 40))))


@pytest.mark.usefixtures("gaining")
def test_a_filter_function_for_linear_layers_alone_leaves_experts():
    model = converted(Model(), filter_fn=lambda module, fqn: module.in_features > 8)
    assert "filter_fn takes no experts" in reason_of(model)
    assert type(model.linear) is f8sub.Float8Linear
    with pytest.raises(AttributeError):
        converted(Model(), filter_fn=lambda module, fqn: module.in_features > 8, experts=True)


@pytest.mark.usefixtures("gaining")
def test_a_backend_without_products_of_experts_leaves_them(monkeypatch):
    monkeypatch.setattr(choice, "Plan", of_a_gpu({"fprop": "triton", "dgrad": "triton", "wgrad": None}))
    assert isinstance(converted(Model()).experts, Float8Experts)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **given: torch.device("cuda"))
    assert isinstance(converted(Model()).experts, Float8Experts)
    monkeypatch.setattr(choice, "Plan", of_a_gpu({"fprop": "triton", "dgrad": "dequantize", "wgrad": None}))
    assert "no float8 kernel for products of experts with rowwise (dgrad by dequantize)" in reason_of(
        converted(Model())
    )


def of_a_gpu(gemms: dict[str, str | None]) -> Any:
    """``Plan`` as it is on a CPU; on a GPU with these backends."""

    def make(recipe: Any, device: torch.device, *given: Any, **more: Any) -> Any:
        if device.type == "cuda":
            return types.SimpleNamespace(gemms=gemms)
        return Plan.make(recipe, device, *given, **more)

    return types.SimpleNamespace(make=make)


@pytest.mark.usefixtures("gaining")
def test_a_refusal_is_the_reason(monkeypatch):
    def refused(*given: Any, **more: Any) -> Any:
        raise f8sub.Float8ConfigError("no grouped product")

    monkeypatch.setattr(choice, "Plan", types.SimpleNamespace(make=refused))
    assert reason_of(converted(Model())) == 'experts="auto": no grouped product'


class CallsNothing(OwnExperts):
    """Multiplies without ``grouped_linear``."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return x @ self.gate[0].t() @ self.down[0].t()


@pytest.mark.usefixtures("gaining")
def test_a_forward_that_calls_no_grouped_linear_is_a_warning():
    model = converted(Model(CallsNothing(EXPERTS, WIDTH, 48)))
    with heard() as told:
        model(gaussian((4, WIDTH), generator(1)))
    assert "called no f8sub.grouped_linear" in told[0]
    with pytest.raises(f8sub.Float8ConfigError, match=r"called no f8sub\.grouped_linear"):
        converted(Model(CallsNothing(EXPERTS, WIDTH, 48)), experts=True)(gaussian((4, WIDTH), generator(1)))


@pytest.mark.usefixtures("gaining")
def test_the_default_is_what_true_is_where_all_experts_gain():
    """The same classes, plans and results; a state dict has the names that it had before."""
    torch.manual_seed(0)
    plain = Model()
    state = plain.state_dict()
    found = []
    for experts in (AUTO_EXPERTS, True):
        model = Model()
        model.load_state_dict(state)
        converted(model, experts=experts, tokens=64)
        assert list(model.state_dict()) == list(state)
        x = gaussian((16, WIDTH), generator(2)).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
        assert model.experts._f8sub.plan == converted(Model(), experts=True).experts._f8sub.plan
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("tokens", [2048, 16384, 65536])
@pytest.mark.parametrize("kind", KINDS)
def test_an_estimate_predicts_what_the_default_converts(kind, tokens, ranks, monkeypatch):
    """In a job of several ranks each is taken to cast its shards alone."""
    monkeypatch.setattr(conversions, "_has_other_ranks", lambda: ranks > 1)
    model, how = on_meta(kind), {"gpus": ["H200"], "tokens": tokens, "mesh": (ranks,)}
    found = f8sub.estimate(model, ["tensorwise"], **how)
    assert found.predictions == f8sub.estimate(model, ["tensorwise"], experts=AUTO_EXPERTS, **how).predictions
    assert "(experts='auto')" in " ".join(str(found).split())
    f8sub.convert_to_float8(model, tokens=tokens)
    reasons = {group.reason is None for group in found.groups if "mlp.experts" in group.name}
    assert reasons == {any(isinstance(module, Float8Experts) for module in model.modules())}


def test_an_estimate_predicts_what_expert_parallelism_converts(monkeypatch):
    """DeepSeek-V3's with 2,048 tokens each, predicted to be 1.33 times as fast, and with fewer."""
    monkeypatch.setattr(conversions, "_has_other_ranks", lambda: True)
    for tokens, converts in ((65536, True), (40960, False)):
        model, how = on_meta("deepseek_v3"), {"experts": AUTO_EXCHANGED, "tokens": tokens}
        found = f8sub.estimate(model, ["tensorwise"], gpus=["H200"], mesh=(4,), **how)
        assert {group.reason is None for group in found.groups if "mlp.experts" in group.name} == {converts}
        if converts:
            assert f"experts='auto_expert_parallel', tokens={tokens}" in " ".join(str(found).split())
        f8sub.convert_to_float8(model, **how)
        assert any(isinstance(module, Float8Experts) for module in model.modules()) == converts


MEASURED = tomllib.loads((Path(__file__).parents[1] / "estimator" / "measured.toml").read_text())
STEPS = [
    (group.get("gpu", "H200"), row["recipe"], tuple(row["sizes"]), row["over_bf16"])
    for group in MEASURED["set"]
    if group["kind"] == "experts"
    for row in group["rows"]
    if "over_bf16" in row
]
"""GPU, recipe, (experts, N, K, tokens) and speed over bf16 of each step of experts that was measured."""


def steps_of_the_pages() -> list[tuple[str, str, tuple[int, ...], float]]:
    """The same, of the tables whose columns are milliseconds of steps; speeds over bf16 are in brackets there."""
    shapes = {
        "DeepSeek": (8, 2048, 7168, 32768),
        "Scout": (16, 8192, 5120, 16384),
        "Qwen3": (128, 768, 2048, 131072),
    }
    docs = Path(__file__).parents[2] / "docs"
    found: list[tuple[str, str, tuple[int, ...], float]] = []
    for page in (docs / "experts.md", docs / "measurements" / "experts.md"):
        lines, gpu, columns = page.read_text().splitlines() if page.exists() else [], "H200", []
        for before, line in pairwise(["", *lines]):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            gpu = next((name for name in GPUS if not line.startswith("|") and f"{name}s" in line), gpu)
            if line.startswith("| milliseconds"):
                columns = columns_of(cells[1:], shapes)
            elif not line.startswith("|") and before.startswith("|"):
                columns = []
            recipe = cells[0].partition("`")[2].partition("`")[0]
            if columns and line.startswith("| f8sub"):
                # "10.02 (1.29) / 11.29 (1.14)" is eager, then compiled.
                for shape, cell in zip(columns, cells[1:], strict=True):
                    speeds = [part.partition(")")[0] for part in cell.split("(")[1:]]
                    found += [(gpu, recipe, shape, float(speed)) for speed in speeds]
    return found


def columns_of(titles: list[str], shapes: dict[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    columns: list[tuple[int, ...]] = []
    for title in titles:
        named = next((shape for name, shape in shapes.items() if title.startswith(name)), None)
        # Uneven groups of the shape before.
        columns.append(named or columns[-1])
    return columns


def test_the_default_converts_no_experts_that_were_measured_to_be_slower():
    """With the tokens of the step, and where they are not known."""
    steps = STEPS + steps_of_the_pages()
    assert len(STEPS) >= 19
    assert len(steps) - len(STEPS) >= 60
    slower = [step for step in steps if step[-1] < 1]
    assert {step[1] for step in slower} >= {"tensorwise", "rowwise", "blockwise"}
    wrong = []
    for gpu, recipe, (experts, n, k, tokens), speed in slower:
        for known in (tokens, None):
            gain = gain_of(weights(experts, n, k), f8sub.get_recipe(recipe), GPUS[gpu], known)
            wrong += [(gpu, recipe, n, k, known, speed)] * gain.gains
    assert wrong == []
    # And most of those that gain are converted.
    clear = {step[:3] for step in steps if step[-1] >= 1.3}
    taken = [
        gain_of(weights(*shape[:3]), f8sub.get_recipe(recipe), GPUS[gpu], shape[3]).speedup >= LEAST
        for gpu, recipe, shape in clear
    ]
    assert sum(taken) > len(taken) / 2


def test_a_model_that_has_nothing_but_experts_which_stay_is_told_why():
    f8sub.register_experts(OwnExperts)
    model = nn.Sequential(OwnExperts(EXPERTS, WIDTH, 48))
    with pytest.raises(f8sub.Float8ConfigError, match="nothing to convert"):
        f8sub.convert_to_float8(model, "rowwise")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f8sub.convert_to_float8(model, "rowwise", strict=False)
    assert "is predicted" in reason_of(model)
