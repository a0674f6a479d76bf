"""Subclasses of nn.Linear that were entered: converted with all that they add, copied, pickled, and back."""

import copy
import pickle

import pytest
import torch
from torch import nn

import f8sub
from f8sub.convert.linear_subclasses import extensions
from tests.convert.models import K, x_of


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.fixture
def doubled():
    extensions.add(Doubled)
    yield nn.Sequential(Doubled(K, K), nn.Linear(K, K))
    extensions.discard(Doubled)


def test_its_forward_runs_around_float8s(doubled):
    plain = copy.deepcopy(doubled)
    plain[0].__class__ = nn.Linear
    f8sub.convert_to_float8(plain)
    f8sub.convert_to_float8(doubled)
    x = x_of(32, K)
    assert isinstance(doubled[0], Doubled)
    assert isinstance(doubled[0], f8sub.Float8Linear)
    assert torch.equal(doubled[0](x), 2 * plain[0](x))
    assert torch.equal(doubled[0](input=x), doubled[0](x))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_of_the_same_class(doubled, again):
    f8sub.convert_to_float8(doubled)
    copied = again(doubled)
    x = x_of(32, K)
    assert type(copied[0]) is type(doubled[0])
    assert torch.equal(copied(x), doubled(x))
    assert copied[0].converted is not doubled[0].converted


def test_back(doubled):
    f8sub.convert_from_float8(f8sub.convert_to_float8(doubled))
    assert type(doubled[0]) is Doubled
    assert type(doubled[1]) is nn.Linear
