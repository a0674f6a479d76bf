"""Which layers are converted: skip, filters, ties, subclasses and shapes, each with its reason."""

import copy
import warnings

import pytest
import torch
from torch import nn

import f8sub
from f8sub.convert import patterns
from tests.convert.models import K, converted, mlp, reasons, x_of


class TiedModel(nn.Module):
    def __init__(self, head: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, K)
        self.up = nn.Linear(K, K)
        setattr(self, head, nn.Linear(K, 64, bias=False))
        getattr(self, head).weight = self.embedding.weight


def test_lm_head_tied_to_the_embedding_stays():
    model = TiedModel("lm_head")
    f8sub.convert_to_float8(model)
    assert converted(model) == ["up"]
    assert model.lm_head.weight is model.embedding.weight
    assert type(model.lm_head.weight) is nn.Parameter


@pytest.mark.parametrize("head", ["lm_head", "output"], ids=str)
def test_a_weight_tied_to_what_stays_in_high_precision_stays(head):
    model = f8sub.convert_to_float8(TiedModel(head), skip_defaults=False)
    assert converted(model) == ["up"]
    assert reasons(model)[head] == "its weight is tied to embedding, which stays in high precision"


def test_a_layer_tied_to_a_skipped_one_stays():
    model = nn.ModuleDict({name: nn.Linear(K, K) for name in ("first", "second", "third")})
    model["third"].weight = model["first"].weight
    f8sub.convert_to_float8(model, skip=("first",))
    assert converted(model) == ["second"]
    assert "tied to first" in reasons(model)["third"]


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Plain(nn.Linear):
    """What decides about a subclass is whose forward it has."""

    def features(self) -> tuple[int, int]:
        return self.in_features, self.out_features


def test_a_subclass_with_a_forward_of_its_own_is_left_alone():
    model = nn.Sequential(Scaled(K, K), nn.Linear(K, K), Plain(K, K))
    model[1].forward = lambda x: x
    f8sub.convert_to_float8(model)
    assert type(model[0]) is Scaled
    assert converted(model) == ["2"]
    assert "its class Scaled overrides nn.Linear's forward" in reasons(model)["0"]
    assert "replaced the forward of this Linear" in reasons(model)["1"]


def test_a_subclass_that_inherits_its_forward_is_converted_as_what_it_is():
    model, plain = nn.Sequential(Plain(K, K)), nn.Sequential(nn.Linear(K, K))
    plain.load_state_dict(model.state_dict())
    f8sub.convert_to_float8(model)
    f8sub.convert_to_float8(plain)
    assert isinstance(model[0], Plain)
    assert isinstance(model[0], f8sub.Float8Linear)
    assert model[0].features() == (K, K)
    assert torch.equal(model(x_of()), plain(x_of()))
    again = copy.deepcopy(model)
    assert type(again[0]) is type(model[0])
    assert type(f8sub.convert_from_float8(model)[0]) is Plain


def test_multihead_attention_is_left_alone():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(K, 2, batch_first=True), "up": nn.Linear(K, K)})
    x = x_of(2, 5, K)
    before = model["attention"](x, x, x)[0]
    f8sub.convert_to_float8(model)
    assert converted(model) == ["up"]
    assert "nn.MultiheadAttention reads this weight itself" in reasons(model)["attention.out_proj"]
    assert torch.equal(model["attention"](x, x, x)[0], before)


@pytest.mark.parametrize("shape", [(K, 40), (40, K), (K, 17), (8, 8)], ids=str)
def test_dims_have_to_be_multiples_of_16(shape):
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(*shape), nn.Linear(K, K)))
    assert converted(model) == ["1"]
    assert f"in_features={shape[0]}, out_features={shape[1]}" in reasons(model)["0"]
    assert "multiples of 16" in reasons(model)["0"]


def test_a_parametrized_weight_is_left_alone():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(K, K)), nn.Linear(K, K))
    f8sub.convert_to_float8(model)
    assert converted(model) == ["1"]
    assert list(reasons(model)) == ["0"]


SKIPS = {
    "one-segment": ("down", ["blocks.0.up", "blocks.10.up", "lm_head2"]),
    "run-of-segments": (
        "blocks.1",
        ["blocks.0.up", "blocks.0.down", "blocks.10.up", "blocks.10.down", "lm_head2"],
    ),
    "glob": ("lm_*", ["blocks.0.up", "blocks.0.down", "blocks.10.up", "blocks.10.down"]),
    "glob-in-a-run": ("blocks.*.up", ["blocks.0.down", "blocks.10.down", "lm_head2"]),
    "part-of-a-segment": (
        "lm_head",
        ["blocks.0.up", "blocks.0.down", "blocks.10.up", "blocks.10.down", "lm_head2"],
    ),
    "the-whole-name": ("blocks.0.up", ["blocks.0.down", "blocks.10.up", "blocks.10.down", "lm_head2"]),
    "longer-than-the-name": (
        "a.b.c.d.e",
        ["blocks.0.up", "blocks.0.down", "blocks.10.up", "blocks.10.down", "lm_head2"],
    ),
    "question-mark": ("?", ["blocks.10.up", "blocks.10.down", "lm_head2"]),
    "not-a-regex": ("d.wn", ["blocks.0.up", "blocks.0.down", "blocks.10.up", "blocks.10.down", "lm_head2"]),
}


@pytest.mark.parametrize("name", SKIPS, ids=list(SKIPS))
def test_skip_is_a_glob_over_whole_segments(name):
    pattern, expected = SKIPS[name]
    blocks = {i: nn.ModuleDict({"up": nn.Linear(K, K), "down": nn.Linear(K, K)}) for i in ("0", "10")}
    model = nn.ModuleDict({"blocks": nn.ModuleDict(blocks), "lm_head2": nn.Linear(K, K)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", f8sub.Float8Warning)
        f8sub.convert_to_float8(model, skip=(pattern,))
    assert converted(model) == expected
    assert all(reason == f"skip={pattern!r}" for reason in reasons(model).values())


def test_skip_adds_to_the_defaults():
    assert converted(f8sub.convert_to_float8(mlp(), skip=["up"])) == ["down"]
    assert converted(f8sub.convert_to_float8(mlp(), filter_fqns=["up"])) == ["down"]
    assert converted(f8sub.convert_to_float8(mlp(), skip_defaults=False)) == ["up", "down", "lm_head"]
    assert converted(f8sub.convert_to_float8(mlp(), skip="up", skip_defaults=False)) == ["down", "lm_head"]


IDLE = {
    "skip": ({"skip": ("lmhead", "blocks.*.dwn")}, r"skip='lmhead' matches nothing \(nearest: lm_head\)"),
    "with-numbers": (
        {"skip": "block.1.down"},
        r"skip='block.1.down' matches nothing \(nearest: blocks.\*.down",
    ),
    "filter_fqns": ({"filter_fqns": ["outptu"]}, r"filter_fqns='outptu' matches nothing$"),
    "recipe": (
        {"recipe": {"dwn": "rowwise", "*": "rowwise"}},
        r"'dwn' matches no linear layer \(nearest: down\)",
    ),
}


@pytest.mark.parametrize("case", IDLE, ids=list(IDLE))
def test_a_pattern_that_matches_nothing_is_a_warning_with_the_nearest_names(case):
    options, message = IDLE[case]
    blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(K, K), "down": nn.Linear(K, K)}) for _ in range(2))
    model = nn.ModuleDict({"blocks": blocks, "norm": nn.LayerNorm(K), "lm_head": nn.Linear(K, K)})
    with pytest.warns(f8sub.Float8Warning, match=message) as warned:
        f8sub.convert_to_float8(model, **options)
    assert [warning.filename for warning in warned] == [__file__]
    assert f8sub.conversion_report(model).idle_patterns


def test_patterns_that_match_any_module_are_silent():
    """pytest makes an error of every Float8Warning."""
    model = nn.ModuleDict({"up": nn.Linear(K, K), "norm": nn.LayerNorm(K), "head": nn.Linear(K, K)})
    f8sub.convert_to_float8(model, skip=("norm", "head"), filter_fqns=["nor"])
    assert reasons(model) == {"head": "skip='head'"}


def test_matches():
    assert patterns.matches("lm_head", "model.lm_head")
    assert patterns.matches("lm_head", "lm_head.proj")
    assert not patterns.matches("lm_head", "lm_head2")
    assert not patterns.matches("", "layers.0")
    assert patterns.matches("*", "layers")


@pytest.mark.parametrize("argument", ["filter_fn", "module_filter_fn"], ids=str)
def test_filter_fn_is_asked_with_module_and_name(argument):
    model, asked = mlp(), []

    def keep(module, fqn):
        asked.append((module, fqn))
        return fqn != "up"

    f8sub.convert_to_float8(model, **{argument: keep})
    assert asked == [(model.up, "up"), (model.down, "down")]
    assert converted(model) == ["down"]
    assert reasons(model) == {"up": "filter_fn said no", "lm_head": "output head (default)"}


def test_every_filter_has_to_agree():
    model = f8sub.convert_to_float8(
        mlp(),
        filter_fn=lambda m, fqn: fqn != "up",
        module_filter_fn=lambda m, fqn: True,
        filter_fqns=["lm"],
    )
    assert converted(model) == ["down"]


def test_filter_fqns_are_parts_of_names():
    assert converted(f8sub.convert_to_float8(mlp(), filter_fqns=["ow"])) == ["up"]
    assert converted(f8sub.convert_to_float8(mlp(), filter_fqns=[])) == ["up", "down"]
