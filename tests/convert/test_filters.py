"""Which layers are converted: skip, filters, ties, subclasses and shapes, each with its reason."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import f8sub
from f8sub.convert.class_swap import extensions
from tests.convert.models import K, converted, mlp, reasons, x_of
from tests.models import silenced


class TiedModel(nn.Module):
    def __init__(self, head: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, K)
        self.up = nn.Linear(K, K)
        setattr(self, head, nn.Linear(K, 64, bias=False))
        getattr(self, head).weight = self.embedding.weight


def test_lm_head_tied_to_the_embedding_stays():
    model = f8sub.convert_to_float8(TiedModel("lm_head"))
    assert converted(model) == ["up"]
    assert model.lm_head.weight is model.embedding.weight
    assert type(model.lm_head.weight) is nn.Parameter


def tied_to_the_first() -> nn.Module:
    model = nn.ModuleDict({name: nn.Linear(K, K) for name in ("first", "second", "third")})
    model["third"].weight = model["first"].weight
    return model


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class Plain(nn.Linear):
    """What decides about a subclass is whose forward it has."""

    def features(self) -> tuple[int, int]:
        return self.in_features, self.out_features


def of_other_forwards() -> nn.Module:
    model = nn.Sequential(Scaled(K, K), nn.Linear(K, K), Plain(K, K))
    model[1].forward = lambda x: x
    return model


TO_THE_EMBEDDING = "its weight is tied to embedding, which stays in high precision"
LEFT = {
    **{
        head: (lambda head=head: TiedModel(head), {"skip_defaults": False}, ["up"], {head: TO_THE_EMBEDDING})
        for head in ("lm_head", "output")
    },
    # What skip_defaults=False does not convert is not left by default.
    "tied by default": (lambda: TiedModel("lm_head"), {}, ["up"], {"lm_head": TO_THE_EMBEDDING}),
    "tied": (
        tied_to_the_first,
        {"skip": "first"},
        ["second"],
        {"first": "skip='first'", "third": "tied to first"},
    ),
    "other forwards": (
        of_other_forwards,
        {},
        ["2"],
        {"0": "its class Scaled overrides nn.Linear's forward", "1": "replaced the forward of this Linear"},
    ),
    "parametrized": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(K, K)), nn.Linear(K, K)),
        {},
        ["1"],
        {"0": ""},
    ),
    **{
        name: (
            lambda change=change: nn.Sequential(change(nn.Linear(K, K)), nn.Linear(K, K)),
            {},
            ["1"],
            {"0": "its weight is parametrized"},
        )
        for name, change in {
            "pruned": functools.partial(prune.l1_unstructured, name="weight", amount=0.5),
            "a weight norm in a hook": torch.nn.utils.weight_norm,
            "a spectral norm in a hook": torch.nn.utils.spectral_norm,
        }.items()
    },
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_alone_and_why(case):
    make, options, expected, why = LEFT[case]
    model = make()
    kinds = {name: type(model.get_submodule(name)) for name in why}
    f8sub.convert_to_float8(model, **options)
    found = reasons(model)
    assert converted(model) == expected
    assert found.keys() == why.keys()
    assert all(part in found[name] for name, part in why.items()), found
    assert {name: type(model.get_submodule(name)) for name in why} == kinds


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


SKIPS = {
    "one-segment": ("down", {"blocks.0.down", "blocks.10.down"}),
    "run-of-segments": ("blocks.1", set()),
    "glob": ("lm_*", {"lm_head2"}),
    "glob-in-a-run": ("blocks.*.up", {"blocks.0.up", "blocks.10.up"}),
    "part-of-a-segment": ("lm_head", set()),
    "the-whole-name": ("blocks.0.up", {"blocks.0.up"}),
    "longer-than-the-name": ("a.b.c.d.e", set()),
    "question-mark": ("?", {"blocks.0.up", "blocks.0.down"}),
    "empty": ("", set()),
    "not-a-regex": ("d.wn", set()),
}
"""Each with the layers that it skips."""


@pytest.mark.parametrize("name", SKIPS, ids=list(SKIPS))
def test_skip_is_a_glob_over_whole_segments(name):
    pattern, skipped = SKIPS[name]
    blocks = {i: nn.ModuleDict({"up": nn.Linear(K, K), "down": nn.Linear(K, K)}) for i in ("0", "10")}
    model = nn.ModuleDict({"blocks": nn.ModuleDict(blocks), "lm_head2": nn.Linear(K, K)})
    with silenced():
        f8sub.convert_to_float8(model, skip=(pattern,))
    assert reasons(model) == dict.fromkeys(skipped, f"skip={pattern!r}")
    assert len(converted(model)) == 5 - len(skipped)


def test_skip_adds_to_the_defaults():
    assert converted(f8sub.convert_to_float8(mlp(), skip=["up"])) == ["down"]
    for parts, left in ((["up"], ["down"]), (["ow"], ["up"]), ([], ["up", "down"])):
        assert converted(f8sub.convert_to_float8(mlp(), filter_fqns=parts)) == left
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
        mlp(), filter_fn=lambda m, fqn: fqn != "up", module_filter_fn=lambda m, fqn: True, filter_fqns=["lm"]
    )
    assert converted(model) == ["down"]


@pytest.fixture
def doubled():
    extensions[Scaled] = {}
    yield nn.Sequential(Scaled(K, K), nn.Linear(K, K))
    del extensions[Scaled]


def test_the_forward_of_an_entered_subclass_runs_around_float8s(doubled):
    plain = copy.deepcopy(doubled)
    plain[0].__class__ = nn.Linear
    f8sub.convert_to_float8(plain)
    f8sub.convert_to_float8(doubled)
    x = x_of(32, K)
    assert isinstance(doubled[0], Scaled)
    assert isinstance(doubled[0], f8sub.Float8Linear)
    assert torch.equal(doubled[0](x), 2 * plain[0](x))
    assert torch.equal(doubled[0](input=x), doubled[0](x))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_an_entered_subclass(doubled, again):
    f8sub.convert_to_float8(doubled)
    copied = again(doubled)
    x = x_of(32, K)
    assert type(copied[0]) is type(doubled[0])
    assert torch.equal(copied(x), doubled(x))
    assert copied[0]._f8sub.conversion is not doubled[0]._f8sub.conversion


def test_an_entered_subclass_and_back(doubled):
    f8sub.convert_from_float8(f8sub.convert_to_float8(doubled))
    assert type(doubled[0]) is Scaled
    assert type(doubled[1]) is nn.Linear
