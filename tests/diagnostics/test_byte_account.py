"""The account of bytes is what is measured: of what is saved, kept, multiplied in backward; and can be read."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import f8sub
from f8sub.diagnostics.bytes import Bytes
from f8sub.estimator.bytes import gathered_bytes, kept_codes, saved_bytes
from f8sub.estimator.estimate import shapes_of
from f8sub.estimator.seconds import Run
from f8sub.linear import float8_linear
from tests.convert.models import mlp
from tests.data_sets import gaussian, generator
from tests.kept_x import RECIPES, WAYS, WIDTH, blocks, is_derivable, model_of, nodes_of
from tests.models import Stack, float8_layers, seed_weights

TOKENS = 24
SAVED_ANYWAY = ("o", "down")
"""In ``blocks``: attention's result, and relu's."""

CASES = [(r, w) for r in RECIPES for w in ("auto", *WAYS) if w != "recompute" or is_derivable(r)]
on_each_case = pytest.mark.parametrize(("recipe", "way"), CASES, ids=["-".join(case) for case in CASES])


def account(model: nn.Module, **options: Any):
    options = {"dtype": torch.float32, "saved_inputs": SAVED_ANYWAY} | options
    return f8sub.conversion_report(model, TOKENS, **options).bytes


def storages(tensors: Any) -> dict[int, int]:
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in found}


def saved_by(y: torch.Tensor, model: nn.Module, is_ours: Callable[[str], bool]) -> int:
    """Bytes that the nodes of linear layers hold and no other node of the graph behind ``y`` does."""
    ours, others = {}, storages(model.parameters())
    for node, tensors in nodes_of(y):
        (ours if is_ours(node.name()) else others).update(storages(tensors))
    return sum(size for address, size in ours.items() if address not in others)


@pytest.mark.parametrize("frozen", [(), ("q", "up")], ids=["", "frozen"])
@on_each_case
def test_saved(recipe, way, frozen):
    model = model_of(recipe, way, blocks(2))
    for name in frozen:
        getattr(model.blocks[0], name).weight.requires_grad_(False)
    x = gaussian((2, TOKENS // 2, WIDTH), generator(1)).requires_grad_()
    saved = saved_by(model(x), model, lambda name: "Float8Matmul" in name)
    assert account(model).here.saved == saved
    assert saved > 0


def test_saved_in_high_precision():
    model = seed_weights(blocks(2))
    x = gaussian((2, TOKENS // 2, WIDTH), generator(1)).requires_grad_()
    saved = saved_by(model(x), model, lambda name: name in ("MmBackward0", "AddmmBackward0"))
    found = account(model)
    assert found.here == found.high_precision
    assert found.here.saved == saved == 2 * 4 * TOKENS * 2 * WIDTH  # of q, k, v; of up
    assert account(model_of("tensorwise", "auto", blocks(2))).high_precision == found.here


def test_names_that_share_and_that_are_saved_are_the_callers_to_give():
    model, of_x = model_of("tensorwise", "float8"), TOKENS * WIDTH + 4
    saved = {layer.fqn: layer.here.saved for layer in account(model, shared_inputs=()).layers}
    assert [saved[f"blocks.0.{name}"] for name in "qkv"] == [of_x] * 3
    shared = {layer.fqn: layer.here.saved for layer in account(model).layers}
    assert [shared[f"blocks.0.{name}"] for name in "qkv"] == [of_x, 0, 0]
    kept = account(model_of("tensorwise", "high_precision"), saved_inputs=())
    assert {layer.here.saved for layer in kept.layers} == {0, 4 * TOKENS * WIDTH, 4 * TOKENS * 48}


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_that_are_not_sharded(recipe):
    model = f8sub.convert_to_float8(seed_weights(Stack(64, 96, 48)), recipe=recipe)
    with torch.no_grad():
        model(gaussian((TOKENS, 64), generator(1)))
    found = account(model).here
    assert found.master == sum(storages(model.parameters()).values()) == 4 * (64 * 96 + 96 * 48)
    kept = [tensor for layer in float8_layers(model) for tensor in layer.weight.cell.cast[1].tensors]
    assert found.codes == sum(storages(kept).values())


def made_in_backward(y: torch.Tensor, kept: dict[int, int]) -> int:
    """Bytes of what the GEMMs of ``y``'s backward read in float8, but for storages that are ``kept``."""
    read: list[torch.Tensor] = []
    gemm_nt = float8_linear.gemm_nt

    def spy(backend: str, a: Any, b: Any, *args: Any) -> torch.Tensor:
        read.extend((*a.tensors, *b.tensors))
        return gemm_nt(backend, a, b, *args)

    with mock.patch.object(float8_linear, "gemm_nt", spy):
        y.backward(gaussian(tuple(y.shape), generator(2)).to(y.dtype))
    return sum(size for address, size in storages(read).items() if address not in kept)


@pytest.mark.parametrize("any_layout", [True, False], ids=["views", "copies"])
@on_each_case
def test_operands_that_backward_makes(recipe, way, any_layout):
    model = model_of(recipe, way, nn.Sequential(nn.Linear(64, 96, bias=False)))
    layer = model[0]
    layer._f8sub.plan = dataclasses.replace(
        layer._f8sub.plan, any_layout=any_layout and layer._f8sub.plan.any_layout
    )
    x = gaussian((TOKENS, 64), generator(1)).requires_grad_()
    y = layer(x)
    kept = {**storages(y.grad_fn.saved_tensors), **storages(layer.weight.cell.cast[1].tensors)}
    made = made_in_backward(y, kept)
    found = account(model).here
    # Scales of a transposition may be shared, and the account has them twice.
    assert 0 <= found.transient - found.wire - made <= 3 * 4
    assert made > 0


def test_several_layers_take_the_sum_and_the_largest_transient():
    model = model_of("tensorwise", "auto")
    found = account(model)
    for name in ("master", "codes", "wire", "saved"):
        assert getattr(found.here, name) == sum(getattr(layer.here, name) for layer in found.layers)
    assert found.here.transient == max(layer.here.transient for layer in found.layers)
    assert Bytes() + found.here == found.here


def test_without_tokens_there_is_no_account_and_with_them_the_report_reads_the_same():
    model = f8sub.convert_to_float8(mlp())
    assert f8sub.conversion_report(model).bytes is None
    assert str(f8sub.conversion_report(model, TOKENS)) == str(f8sub.conversion_report(model))


def test_a_model_on_meta():
    with torch.device("meta"):
        model = blocks()
    found = account(f8sub.convert_to_float8(model)).here
    here = account(model_of("tensorwise", "auto")).here
    assert dataclasses.astuple(found)[:4] == dataclasses.astuple(here)[:4]


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_estimate_counts_the_same_operands(recipe):
    """What is sent, kept and saved of a model that is not sharded."""
    model = model_of(recipe, "auto", blocks(2))
    shapes, run = shapes_of(model), Run(TOKENS, TOKENS, shards=1, checkpoint="none", sharded=False)
    found, made = account(model, dtype=torch.bfloat16, saved_inputs=()), f8sub.get_recipe(recipe)
    assert sum(gathered_bytes(product, made) for product in shapes.products) == found.here.wire
    assert kept_codes(shapes, made, run) == found.here.codes
    wire_of_bf16 = sum(gathered_bytes(product, None) for product in shapes.products)
    assert wire_of_bf16 == found.high_precision.wire
    own = replace(shapes, products=tuple(replace(p, reads_attention=False) for p in shapes.products))
    saved = sum(saved_bytes(block, made, run) for block in own.blocks.values())
    y = sum(2 * TOKENS * product.rows for product in shapes.products)
    assert saved - y == found.here.saved
