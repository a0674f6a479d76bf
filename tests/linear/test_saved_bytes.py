"""What a layer keeps for backward: the bytes of each way to keep x, what "auto" chooses, nothing of the weight."""

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import f8sub
from f8sub.linear import float8_linear
from tests import oracle
from tests.compiling import SavedShapes
from tests.counting import FLOAT8, Float8Work
from tests.data_sets import gaussian, generator
from tests.kept_x import HEADS, TOKENS, WIDTH, Block, is_derivable, model_of, nodes_of, on_each_way, tokens
from tests.layers import RECIPES, K, in_float8, made, on_each_recipe, x_of
from tests.models import Stack, seed_weights, shard


class Saved(SavedShapes):
    """Storages saved for backward during ``run``, parameters aside, as they are after it."""

    def __init__(self, run: Callable[[], torch.Tensor], parameters: list[torch.Tensor]) -> None:
        super().__init__(run)
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in self.tensors}
        for parameter in parameters:
            storages.pop(parameter.untyped_storage()._cdata, None)
        self._tensors = list(storages.values())

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().size() for tensor in self._tensors)

    def bytes_in(self, *dtypes: torch.dtype) -> int:
        return sum(tensor.untyped_storage().size() for tensor in self._tensors if tensor.dtype in dtypes)


def bytes_of_saved(x: torch.Tensor, recipe: str) -> int:
    """Of what wgrad needs of x: its columnwise codes and their scales, or x itself."""
    if f8sub.get_recipe(recipe).wgrad.b is None:
        return x.nbytes
    spec, shape = oracle.spec_of(recipe, "x"), (x.shape[-1], x.shape[:-1].numel())
    return spec.code_bytes(*shape) + spec.scale_bytes(*shape)


class Projections(nn.Module):
    """Three layers that read one x, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, size, bias=False) for size in (64, 32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)


@on_each_way
@on_each_recipe
def test_bytes_that_one_layer_saves(recipe, way):
    if way == "recompute" and not is_derivable(recipe):
        pytest.skip("refused")
    layer = model_of(recipe, way, nn.Sequential(nn.Linear(64, 96, dtype=torch.bfloat16)))[0]
    x = x_of(4, 24, 64, dtype=torch.bfloat16)
    saved = Saved(lambda: layer(x), list(layer.parameters()))
    if way == "float8" or not in_float8(recipe)["dw"]:
        expected = bytes_of_saved(x, recipe)
    elif way == "high_precision":
        # delayed scaling's scale of then, too
        expected = x.nbytes + (4 if f8sub.get_recipe(recipe).delayed else 0)
    else:
        spec = oracle.spec_of(recipe, "x")
        expected = spec.code_bytes(96, 64) + spec.scale_bytes(96, 64)
    assert saved.bytes == expected
    assert saved.y.grad_fn is not None


@on_each_way
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "gridquant"])
def test_siblings_save_one_x_and_cast_it_once_in_forward(recipe, way):
    model, x = model_of(recipe, way, Projections()), x_of(48, 64)
    with Float8Work() as work:
        saved = Saved(lambda: model(x), list(model.parameters()))
    alone = model_of(recipe, way, nn.Sequential(nn.Linear(64, 64, bias=False)))
    of_one = Saved(lambda: alone(x), list(alone.parameters())).bytes
    scales = 2 * 4 if way == "high_precision" and recipe == "delayed" else 0  # each has a scale of its own
    assert saved.bytes == of_one + scales
    assert work.casts.count((48, 64)) == 1


def bytes_held(y: torch.Tensor) -> int:
    storages = [tensor.untyped_storage() for _, saved in nodes_of(y) for tensor in saved]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("recipe", [r for r in RECIPES if in_float8(r)["dw"]])
def test_auto_saves_nothing_of_what_attention_and_relu_save_anyway(recipe):
    x = tokens()
    held = {}
    for way in ("auto", "float8", "high_precision"):
        model = model_of(recipe, way)
        held[way] = bytes_held(model(x))
    of_o = bytes_of_saved(torch.empty(2, TOKENS, WIDTH), recipe)
    of_down = bytes_of_saved(torch.empty(2, TOKENS, 48), recipe)
    of_each = 2 * 4 if f8sub.get_recipe(recipe).delayed else 0
    assert held["float8"] - held["auto"] == of_o + of_down - of_each
    by_hand = model_of(recipe, {"o": "high_precision", "down": "high_precision", "*": "float8"})
    assert bytes_held(by_hand(x)) == held["auto"]


MADE = {
    "attention": (lambda b, x: b.attention(x), True),
    "attention, one head": (lambda b, x: b.attention(x)[..., : WIDTH // HEADS], True),
    "relu": (lambda b, x: torch.relu(b.q(x)), True),
    "sigmoid, seen otherwise": (lambda b, x: torch.sigmoid(b.q(x)).view(-1, WIDTH).unsqueeze(0), True),
    "a copy of attention's": (lambda b, x: b.attention(x).clone(), False),
    "attention's, laid out anew": (lambda b, x: b.attention(x).transpose(0, 1).flatten(0, 1), False),
    "silu": (lambda b, x: F.silu(b.q(x)), False),
    "another layer's": (lambda b, x: b.q(x), False),
    "a leaf": (lambda b, x: x, False),
    "no gradient": (lambda b, x: b.attention(x).detach(), False),
    "changed in place": (lambda b, x: b.attention(x).mul_(2), False),
    "logsumexp": (lambda b, x: logsumexp(b, x), False),
}


def logsumexp(block: Block, x: torch.Tensor) -> torch.Tensor:
    """The other result of attention, which is saved under another name."""
    q = block.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[1]
    return lse.flatten(1)[:, :16]


@pytest.mark.parametrize("case", MADE)
def test_what_auto_finds_saved(case):
    make, found = MADE[case]
    block = model_of("tensorwise", "auto").blocks[0]
    x = make(block, tokens())
    layer = model_of("tensorwise", "auto", nn.Sequential(nn.Linear(x.shape[-1], 48)))[0]
    # Of no bias and two dimensions, y's own node is the layer's.
    y = layer(x.flatten(0, -2))  # held: the node of torch 2.11 has nothing without it
    kept = {tensor.dtype for tensor in y.grad_fn.saved_tensors}
    assert (torch.float8_e4m3fn in kept) != found


def test_auto_is_float8_under_hooks_which_pack_each_tensor_by_itself():
    model, x = model_of("tensorwise", "auto"), tokens()
    saved = Saved(lambda: model(x), list(model.parameters()))
    float8 = model_of("tensorwise", "float8")
    assert saved.bytes == Saved(lambda: float8(x), list(float8.parameters())).bytes
    assert saved.bytes_in(*FLOAT8) == 2 * TOKENS * (3 * WIDTH + 48)


@on_each_way
@on_each_recipe
def test_without_wgrad_nothing_of_x_is_saved(recipe, way):
    if way == "recompute" and not is_derivable(recipe):
        pytest.skip("refused")
    layer = model_of(recipe, way, nn.Sequential(nn.Linear(64, 96, bias=False)))[0]
    x = x_of(24, 64)
    with torch.no_grad():
        assert layer(x).grad_fn is None
    layer.weight.requires_grad_(False)
    saved = Saved(lambda: layer(x), list(layer.parameters()))
    assert saved.bytes == 0
    saved.y.backward(gaussian((24, 96), generator(1)))
    assert x.grad is not None


def test_what_dgrad_read_is_gone_when_wgrad_runs(monkeypatch):
    """Of an output projection that is a byte for each logit."""
    layer, x = made("rowwise"), x_of(32, K)
    y: torch.Tensor = layer(x)
    read: list[Callable[[], torch.Tensor | None]] = []
    alive = []

    def multiply(backend, a, b, *how):
        alive.append([each() is not None for each in read])
        read.extend(weakref.ref(operand.data) for operand in (a, b))
        return run(backend, a, b, *how)

    run = float8_linear.gemm_nt
    monkeypatch.setattr(float8_linear, "gemm_nt", multiply)
    y.backward(gaussian(y.shape, generator(2)))
    assert alive == [[], [False, False]]


@on_each_recipe
def test_under_fsdp_all_that_is_left_of_the_weight_after_forward_is_its_shard(rank, world, recipe):
    """Unsharded codes that autograd saw are FSDP's to free; the shard in high precision is a parameter."""
    of_x, spec = bytes_of_saved(x_of(24, 64), recipe), oracle.spec_of(recipe, "x")
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(64, 96)), recipe=recipe))
    x = x_of(24, 64)
    f8sub.precompute_scales(model)
    saved = Saved(lambda: model(x), [])
    codes = saved.bytes_in(oracle.TORCH_DTYPES[spec.format], torch.uint8)
    assert codes == (0 if f8sub.get_recipe(recipe).wgrad.b is None else spec.code_bytes(64, 24))
    assert saved.bytes <= of_x + oracle.spec_of(recipe, "w").scale_bytes(96, 64) + 96 * 64 * 4 // 2
    saved.y.backward(gaussian(tuple(saved.y.shape), generator(3)))
