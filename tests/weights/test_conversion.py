"""The weights of one conversion are those of layers that are alive and still float8's."""

import copy
import gc

import torch
from torch import nn

import f8sub


def converted() -> nn.Sequential:
    torch.manual_seed(0)
    return f8sub.convert_to_float8(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))))


def test_records_are_those_of_the_layers_that_are_left() -> None:
    model = converted()
    conversion = model[0]._f8sub.conversion
    assert {record.fqn for record in conversion.records} == {"0", "1", "2"}
    del model[1]
    gc.collect()
    assert {record.fqn for record in conversion.records} == {"0", "2"}


def test_another_parameter_of_a_listed_layer_is_listed_and_a_list_in_use_stays() -> None:
    model = converted()
    conversion = model[0]._f8sub.conversion
    before = conversion.records
    conversion.add(model[0], "bias", "0.bias", None, False)
    assert {record.fqn for record in conversion.records} == {"0", "0.bias", "1", "2"}
    assert {record.fqn for record in before} == {"0", "1", "2"}


def test_what_is_converted_back_is_no_longer_listed() -> None:
    model = converted()
    conversion = model[0]._f8sub.conversion
    assert len(conversion.records) == 3
    f8sub.convert_from_float8(model)
    assert conversion.records == []


def test_a_copy_lists_its_own_weights() -> None:
    model = converted()
    copied = copy.deepcopy(model)
    theirs = copied[0]._f8sub.conversion.records
    assert {record.module for record in theirs} == set(copied)
    assert {record.module for record in model[0]._f8sub.conversion.records} == set(model)
