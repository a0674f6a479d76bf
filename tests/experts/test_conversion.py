"""convert_to_float8(model, experts=True): which experts are converted, what they compute, and what the report says."""

import copy
import functools
import importlib
import inspect
import pathlib
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import f8sub
from f8sub.experts import seams
from f8sub.experts.module import Float8Experts
from f8sub.kernels.grouped import gemm
from tests.data_sets import gaussian, generator
from tests.experts.models import (
    MODELS,
    OwnExperts,
    experts_of,
    judged_by_expert,
    layer_of,
    of_transformers,
)
from tests.models import refusal

RECIPES = ["tensorwise", "rowwise", "blockwise", "nvfp4"]


@pytest.fixture(autouse=True)
def registered():
    """OwnExperts are known in each test, and in no other file's."""
    before = dict(seams._registered)
    f8sub.register_experts(OwnExperts)
    yield
    seams._registered.clear()
    seams._registered.update(before)


def losses_and_gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(1, 64, (2, 12), generator=generator(1))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def converted(model: nn.Module, recipe="rowwise", **options: object) -> nn.Module:
    given = {"experts": True, "backend": "reference", "skip_defaults": False, **options}
    return f8sub.convert_to_float8(model, recipe, **given)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers_compute_as_a_linear_layer_for_each_expert(kind, recipe):
    pytest.importorskip("transformers")
    model = converted(of_transformers(kind), recipe)
    assert all(isinstance(module, Float8Experts) for module in experts_of(model))
    loss, gradients = losses_and_gradients(model)
    judge = judged_by_expert(converted(of_transformers(kind), recipe, experts=False), recipe)
    expected, theirs = losses_and_gradients(judge)
    assert torch.equal(loss, expected)
    assert gradients.keys() == theirs.keys()
    for name, gradient in gradients.items():
        if name.endswith("proj_bias"):  # a sum over tokens in another order
            torch.testing.assert_close(gradient, theirs[name], rtol=2**-7, atol=0)
        else:
            assert torch.equal(gradient, theirs[name]), name


def test_the_implementation_of_a_config_does_not_matter():
    pytest.importorskip("transformers")
    found = [
        losses_and_gradients(converted(of_transformers("mixtral", how)))[0] for how in ("eager", "batched_mm")
    ]
    assert torch.equal(*found)


def test_experts_of_other_ranks_get_nothing():
    """Their numbers are past the last expert, as transformers' expert parallelism has it."""
    pytest.importorskip("transformers")
    (experts,) = experts_of(converted(of_transformers("qwen3_moe")))
    x = gaussian((8, 32), generator(2)).bfloat16()
    index = torch.tensor([[0, 6]] * 8)
    weights = torch.full((8, 2), 0.5)
    alone = experts(x, torch.zeros(8, 1, dtype=torch.int64), weights[:, :1])
    assert torch.equal(experts(x, index, weights), alone)


@pytest.mark.long
def test_every_experts_class_of_transformers_has_the_seam():
    """All that ``use_experts_implementation`` made, found by their source."""
    transformers = pytest.importorskip("transformers")
    root = pathlib.Path(transformers.__file__).parent / "models"
    names = [
        path for path in root.glob("*/modeling_*.py") if "@use_experts_implementation" in path.read_text()
    ]
    checked = 0
    for path in names:
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for cls in vars(module).values():
            if isinstance(cls, type) and cls.__module__ == module.__name__ and hasattr(cls, "_apply_gate"):
                assert cls.forward.__closure__ is not None  # the interface's, which names an implementation
                weights = set(re.findall(r"self\.(\w+) = nn\.Parameter", inspect.getsource(cls)))
                assert {name.removesuffix("_bias") for name in weights} <= {
                    "gate_up_proj",
                    "up_proj",
                    "down_proj",
                }
                checked += 1
    assert checked > 40


def by_expert(*, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """torchtitan's seam with a Float8Linear for each expert."""
    ends = offs.tolist()
    parts = [A[first:end] for first, end in zip([0, *ends], ends, strict=False)]
    found = [layer_of(w.t(), "rowwise")(part) for part, w in zip(parts, B_t, strict=True) if len(part)]
    return torch.cat([*found, A.new_zeros(len(A) - ends[-1], B_t.shape[2])])


@pytest.mark.parametrize("name", ["common.moe.GroupedExperts", "gpt_oss.moe.GptOssGroupedExperts"])
def test_torchtitans_experts(name):
    module, _, cls = name.rpartition(".")
    kind = getattr(pytest.importorskip(f"torchtitan.models.{module}"), cls)
    if not hasattr(kind, "_grouped_mm"):
        pytest.skip("torchtitan 0.2 has no seam")
    plain = kind(kind.Config(dim=32, hidden_dim=48, num_experts=3))
    rng = generator(4)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(0.2 * gaussian(tuple(parameter.shape), rng))
    plain = plain.bfloat16()
    judge = copy.deepcopy(plain)
    judge._grouped_mm = by_expert
    counts = torch.tensor([5, 0, 11])
    x, dy = (gaussian((18, 32), rng).bfloat16() for _ in range(2))
    found = []
    for model in (converted(plain), judge):
        given = x.clone().requires_grad_()
        y = model(given, counts)
        y.backward(dy)
        found.append((y, given.grad, *(p.grad for _, p in sorted(model.named_parameters()))))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def own() -> nn.Module:
    return nn.ModuleDict(
        {"mlp": nn.ModuleDict({"experts": OwnExperts(3, 32, 48)}), "head": nn.Linear(32, 16)}
    )


def run(experts: nn.Module) -> torch.Tensor:
    return experts(gaussian((16, 32), generator(5)), torch.tensor([5, 5, 16]))


def test_users_own_experts_are_in_high_precision_until_they_are_converted():
    model = own()
    before = run(model.mlp.experts)
    converted(model)
    after = run(model.mlp.experts)
    assert 0 < (after - before).norm() < 0.1 * before.norm()
    f8sub.convert_from_float8(model)
    assert torch.equal(run(model.mlp.experts), before)
    assert type(model.mlp.experts) is OwnExperts
    assert type(model.mlp.experts.up.data) is torch.Tensor
    assert "_f8sub" not in vars(model.mlp.experts)


def test_a_forward_in_place_of_the_classs_own():
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(gaussian((2, 32, 48), generator(6)))  # (E, K, N)

        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

    def forward(module: Raw, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return f8sub.grouped_linear(x, module.w, ends, transposed=True)

    f8sub.register_experts(Raw, weights=("w",), transposed=True, forward=forward)
    model = converted(Raw())
    x, ends = gaussian((16, 32), generator(5)), torch.tensor([5, 16])
    found = model(x, ends)
    expected = f8sub.grouped_linear(x, Raw().w, ends, "rowwise", transposed=True)
    assert torch.equal(found, expected)


class Unknown(nn.Module):
    """Experts that multiply by torch's own product."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(gaussian((3, 48, 32), generator(6)).bfloat16())

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return x if x.numel() == 0 else torch._grouped_mm(x, self.w.transpose(1, 2), offs=ends.int())


def test_the_report_names_experts_that_nobody_registered():
    model = converted(nn.ModuleDict({"moe": Unknown(), "head": nn.Linear(32, 16)}))
    (other,) = f8sub.conversion_report(model).others
    assert (other.fqn, other.converted, other.parameters) == ("moe", False, 3 * 48 * 32)
    assert "f8sub.register_experts lets them be converted" in other.detail
    known = f8sub.conversion_report(own()).others
    assert not any("register_experts" in each.detail for each in known)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_that_calls_no_grouped_linear_is_no_float8(compiled):
    """It would train in high precision while the report says float8. A rank without tokens may return early."""
    f8sub.register_experts(Unknown)
    model = converted(nn.ModuleDict({"moe": Unknown(), "head": nn.Linear(32, 16)}))
    x, ends = gaussian((16, 32), generator(5)).bfloat16(), torch.tensor([5, 5, 16])
    assert model.moe(x[:0], ends).shape == (0, 32)
    if compiled:
        model.moe.compile(backend="eager")
    message = refusal(f8sub.Float8ConfigError, model.moe, x, ends)
    assert message.startswith("moe: the forward of Unknown called no f8sub.grouped_linear")


def test_a_module_of_transformers_reads_nothing_back(monkeypatch):
    """Forward and backward on the meta device, where reading a value raises; products are those of a GPU there."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(gemm, "high_precision_rows", lambda x, w, groups: x.new_empty(len(x), w.shape[1]))
    monkeypatch.setattr(
        gemm,
        "high_precision_weights",
        lambda dy, x, groups: x.new_empty(len(groups.ends), dy.shape[1], x.shape[1]),
    )
    for kind in ("qwen3_moe", "gpt_oss"):
        (experts,) = experts_of(of_transformers(kind).to("meta"))
        experts = converted(experts, "rowwise", backend="dequantize")
        x = torch.empty(24, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
        index, weights = (
            torch.empty(24, 2, dtype=torch.int64, device="meta"),
            torch.empty(24, 2, device="meta"),
        )
        y = experts(x, index, weights)
        y.backward(torch.empty_like(y))
        assert x.grad.shape == y.shape == x.shape
        assert experts.down_proj.grad.shape == experts.down_proj.shape


def test_without_the_option_the_report_names_it():
    model = own()
    f8sub.convert_to_float8(model, "rowwise", skip_defaults=False, experts=False)
    report = f8sub.conversion_report(model)
    (others,) = report.others
    assert not others.converted
    assert "stay in high precision" in others.detail
    assert others.detail.endswith("pass experts=True to convert")
    assert report.summary.endswith("experts: 1 module stays in high precision: pass experts=True to convert")


def test_the_report_counts_experts():
    model = converted(own())
    report = f8sub.conversion_report(model)
    assert report.flops_share == 1.0
    assert report.parameters_share == 1 - 16 / report.parameters  # the head's bias
    assert "and 1 module of experts in float8" in report.summary
    assert "in float8: Float8OwnExperts: rowwise, reference; all 3 counted" in str(report)
    assert "OwnExperts(rowwise, reference)" in repr(model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"skip": "mlp.*"}, "skip='mlp.*'"),
        ({"filter_fqns": ["experts"]}, "filter_fqns='experts'"),
        ({"filter_fn": lambda module, fqn: isinstance(module, nn.Linear)}, "filter_fn said no"),
        ({"recipe": {"head": "rowwise"}}, "no pattern of recipe matches it"),
    ],
)
def test_what_leaves_experts_as_they_are(options, reason):
    model = own()
    converted(model, **options)
    assert isinstance(model.head, f8sub.Float8Linear)
    assert not isinstance(model.mlp.experts, Float8Experts)
    assert f8sub.conversion_report(model).others[0].detail.endswith(reason)


def test_a_recipe_by_layer():
    model = converted(own(), {"mlp.experts": "blockwise", "head": "rowwise"})
    assert model.mlp.experts._f8sub.plan.recipe.name == "blockwise"
    assert model.head._f8sub.plan.recipe.name == "rowwise"
    assert "already converted with recipe 'blockwise'" in refusal(
        f8sub.Float8ConfigError, converted, model, "rowwise"
    )


def test_experts_alone_are_something_to_convert():
    model = converted(OwnExperts(3, 32, 48))
    assert isinstance(model, Float8Experts)
    assert model._f8sub.fqn == "(root)"
    with pytest.warns(f8sub.Float8Warning, match="the model has 1 module in float8"):
        converted(model)
    f8sub.precompute_scales(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda e: setattr(e, "up", nn.Parameter(torch.zeros(3, 40, 32))), "multiples of 16"),
        (lambda e: e.double(), "torch.float64"),
        (lambda e: setattr(e, "forward", e.forward), "something replaced the forward"),
    ],
)
def test_experts_that_cannot_be(change, reason):
    model = own()
    change(model.mlp.experts)
    converted(model, filter_fn=lambda module, fqn: fqn != "head" or module.weight.dtype == torch.float32)
    assert reason in f8sub.conversion_report(model).others[0].detail


def test_a_name_that_is_no_weight():
    f8sub.register_experts(OwnExperts, weights=("sideways",))
    model = converted(own())
    assert "sideways is no parameter of three dimensions" in f8sub.conversion_report(model).others[0].detail
    assert "takes a class" in refusal(f8sub.Float8ConfigError, f8sub.register_experts, OwnExperts(3, 32, 48))


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ("sideways", "sideways is no parameter of three dimensions"),
        (None, "bias is (3, 1, 48): the last two have to be multiples of 16"),
    ],
)
def test_an_error_says_why_experts_alone_were_not_converted(weights, reason):
    class WithBias(OwnExperts):
        def __init__(self) -> None:
            super().__init__(3, 32, 48)
            self.bias = nn.Parameter(torch.zeros(3, 1, 48))

    f8sub.register_experts(WithBias, weights=weights)
    message = refusal(f8sub.Float8ConfigError, converted, WithBias())
    assert f"nor does f8sub convert its WithBias ({reason}" in message


def test_one_name_of_a_weight():
    class OneWeight(OwnExperts):
        pass

    f8sub.register_experts(OneWeight, weights="up")
    assert list(converted(OneWeight(3, 32, 48))._f8sub.weights) == ["up"]


def test_a_backend_that_experts_do_not_have_changes_nothing():
    options = {"experts": True, "backend": "scaled_mm", "skip_defaults": False}
    model, call = own(), functools.partial(f8sub.convert_to_float8, **options)
    recipes = {"head": "tensorwise", "*": "blockwise"}
    assert "no grouped product" in refusal(f8sub.Float8ConfigError, call, model, recipes)
    assert type(model.head) is nn.Linear


def test_weights_train():
    model = converted(own())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = run(model.mlp.experts).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


def test_frozen_experts_and_no_tokens():
    experts = converted(own()).mlp.experts.requires_grad_(False)
    x = gaussian((16, 32), generator(5)).requires_grad_()
    y = experts(x, torch.tensor([5, 5, 16]))
    y.backward(gaussian(tuple(y.shape), generator(6)))
    assert x.grad.any()
    assert experts.up.grad is None
    experts.requires_grad_(True)
    y = experts(x[:0], torch.tensor([0, 0, 0]))
    assert y.shape == (0, 32)
    y.backward(gaussian((0, 32), generator(6)))
    assert not experts.up.grad.any()


def test_errors_name_the_module():
    model = converted(own())
    message = refusal(
        f8sub.Float8ShapeError, model.mlp.experts, torch.zeros(16, 32), torch.tensor([9, 5, 16])
    )
    assert message.startswith("mlp.experts: ends of groups ascend")


def test_a_second_conversion_leaves_experts_as_they_are():
    model = converted(nn.Sequential(nn.Linear(64, 64), OwnExperts(2, 64, 64)))
    with pytest.warns(f8sub.Float8Warning, match="found nothing more to convert; the model has 2 modules"):
        f8sub.convert_to_float8(model, "rowwise", skip_defaults=False, experts="auto")
    assert isinstance(model[1], Float8Experts)


def _without_a_gate() -> nn.Module:
    kinds = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    sizes = {"n_routed_experts": 3, "hidden_size": 32, "moe_intermediate_size": 48, "moe_latent_size": None}
    return kinds.NemotronHExperts(SimpleNamespace(**sizes, mlp_hidden_act="relu2"))


def _with_a_norm() -> nn.Module:
    kinds = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")
    sizes = {"num_local_experts": 3, "moe_hidden_size": 32, "moe_intermediate_size": 48}
    return kinds.MuseSparkExperts(SimpleNamespace(**sizes, hidden_act="silu", post_norm_eps=1e-5))


@pytest.mark.parametrize("made", [_without_a_gate, _with_a_norm])
def test_experts_of_other_architectures_are_their_own_forward_in_float8(made):
    """Nemotron H has no gate, and Muse Spark a norm after each expert."""
    experts, rng = made(), generator(1)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(0.2 * gaussian(tuple(parameter.shape), rng))
    first = next(name for name in ("up_proj", "gate_up_proj") if hasattr(experts, name))
    layers = {
        name: [layer_of(weight, "rowwise") for weight in getattr(experts, name).detach().clone()]
        for name in (first, "down_proj")
    }
    x, index = gaussian((8, 32), rng), torch.randint(0, 3, (8, 2), generator=rng)
    scores = gaussian((8, 2), rng).softmax(1)
    expected = torch.zeros(8, 32)
    for expert in range(3):
        token, slot = (index == expert).nonzero().unbind(1)
        h = layers[first][expert](x[token])
        if first == "gate_up_proj":
            gate, up = h.chunk(2, dim=-1)
            h = experts.act_fn(gate) * up
        else:
            h = experts.act_fn(h)
        y = layers["down_proj"][expert](h)
        y = experts.post_expert_norm(y) if first == "gate_up_proj" else y
        expected.index_add_(0, token, y * scores[token, slot][:, None])
    f8sub.convert_to_float8(experts, "rowwise", experts=True, backend="reference")
    torch.testing.assert_close(experts(x, index, scores), expected, rtol=1e-5, atol=1e-6)
