"""The bytes of experts in a conversion report are those that are kept and saved."""

from typing import Any

import pytest
import torch

import f8sub
from f8sub.experts import seams
from tests.data_sets import gaussian, generator
from tests.experts.models import OwnExperts
from tests.kept_x import nodes_of

EXPERTS, WIDTH, HIDDEN, TOKENS = 3, 128, 256, 40
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "gridquant", "mxfp8", "delayed"]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(seams, "_registered", {OwnExperts: seams.Seam()})


def converted(recipe: str) -> OwnExperts:
    return f8sub.convert_to_float8(OwnExperts(EXPERTS, WIDTH, HIDDEN), recipe, experts=True)


def storages(tensors: Any) -> dict[int, int]:
    """Bytes of floating-point tensors by their storage; where groups lie is not counted."""
    found = [t.untyped_storage() for t in tensors if t.is_floating_point() or t.dtype == torch.uint8]
    return {storage._cdata: storage.nbytes() for storage in found}


def run(model: OwnExperts) -> torch.Tensor:
    # Nothing says how many experts a token is sent to, so each is counted for all of them.
    x = gaussian((EXPERTS * TOKENS, WIDTH), generator(1)).requires_grad_()
    return model(x, torch.tensor([50, 50, EXPERTS * TOKENS]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_saved_and_kept(recipe):
    model = converted(recipe)
    y = run(model)
    of_weights = storages(p.plain for p in model.parameters())
    saved: dict[int, int] = {}
    for node, tensors in nodes_of(y):
        if "GroupedMatmul" in node.name():
            plain = [getattr(t, "plain", t) for t in tensors]
            saved.update(storages(plain))
    of_nodes = sum(size for address, size in saved.items() if address not in of_weights)
    account = f8sub.conversion_report(model, TOKENS, dtype=torch.float32).bytes
    assert [layer.fqn for layer in account.layers] == ["gate", "up", "down"]
    assert account.layers[0].shape == (EXPERTS, HIDDEN, WIDTH)
    assert account.layers[1].here.saved == 0  # gate's
    assert account.here.saved == of_nodes > 0
    assert account.here.master == sum(of_weights.values())
    # 128 rows in blocks of 256 are cast anew for each product.
    kept = [t for p in model.parameters() if p.cell.cast is not None for t in p.cell.cast[1].tensors]
    assert account.here.codes == sum(storages(kept).values())
    assert account.high_precision.saved == 4 * EXPERTS * TOKENS * (WIDTH + HIDDEN)


def test_experts_that_are_not_converted():
    model = OwnExperts(EXPERTS, WIDTH, HIDDEN)
    account = f8sub.conversion_report(model, TOKENS).bytes
    assert (
        account.here
        == account.high_precision
        == f8sub.conversion_report(converted("rowwise"), TOKENS).bytes.high_precision
    )


def test_frozen_experts_save_no_tokens():
    model = converted("rowwise").requires_grad_(False)
    assert f8sub.conversion_report(model, TOKENS).bytes.here.saved == 0


def test_operands_that_backward_makes():
    """Of one weight: dgrad's of dy and of the weight, wgrad's of dy; nothing of the weight where a view will do."""
    elements = EXPERTS * WIDTH * HIDDEN
    found = {
        recipe: f8sub.conversion_report(converted(recipe), TOKENS).bytes.layers[0].here
        for recipe in ("tensorwise", "rowwise")
    }
    made = {recipe: here.transient - here.wire for recipe, here in found.items()}
    of_dy = 2 * EXPERTS * TOKENS * HIDDEN
    assert made["tensorwise"] == of_dy + 2 * 4 * EXPERTS
    assert made["rowwise"] == elements + of_dy + 4 * EXPERTS * (WIDTH + TOKENS + HIDDEN)
