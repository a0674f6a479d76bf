"""A fused feed-forward equals its layers one after the other, bitwise, and is found by what its forward does."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import f8sub
from f8sub import Float8ConfigError
from f8sub.feed_forward import FusedFeedForward, _FeedForward
from tests.compiling import SavedShapes
from tests.data_sets import DATA_SETS, generator, make
from tests.dist.models import seed_weights
from tests.selection import long_but

WIDTH, HIDDEN, TOKENS = 64, 96, 48
RECIPES = [name for name in f8sub.recipe_names() if name != "rowwise_with_gw_hp"]
on_each_recipe = pytest.mark.parametrize("recipe", RECIPES)


class FeedForward(nn.Module):
    """torchtitan's names."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias), nn.Linear(WIDTH, HIDDEN, bias)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Other(FeedForward):
    """Any forward over the same layers."""

    def __init__(self, forward: Callable[["Other", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.own = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self, x)


def both(
    recipe: str, dtype: torch.dtype = torch.bfloat16, bias: bool = False, **options: object
) -> tuple[nn.Module, nn.Module]:
    """The same layers unfused and fused."""
    model = seed_weights(FeedForward(bias)).to(dtype)
    plain = f8sub.convert_to_float8(model, recipe=recipe, **options)
    return plain, f8sub.fuse_producers(copy.deepcopy(plain))


def results(
    model: nn.Module, x: torch.Tensor, dy: torch.Tensor, run: Callable[..., torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """y, dx, all gradients and all buffers."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(3)  # nvfp4 rounds dy at random
    y = model(x) if run is None else run(x)
    y.backward(dy.to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


def inputs(data: str = "gaussian", step: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [
        make(data, (3, TOKENS // 3, WIDTH), seed, dtype).clamp(-1e4, 1e4) for seed in (step + 1, step + 101)
    ]


def assert_equal(found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(found) == len(right)
    for index, (ours, theirs) in enumerate(zip(found, right, strict=True)):
        assert torch.equal(ours, theirs), index


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@on_each_recipe
def test_it_is_bitwise_the_layers(recipe, bias):
    plain, fused = both(recipe, bias=bias)
    for step, data in enumerate(DATA_SETS):
        assert_equal(results(fused, *inputs(data, step)), results(plain, *inputs(data, step)))
        f8sub.precompute_scales(plain)
        f8sub.precompute_scales(fused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@on_each_recipe
def test_other_dtypes(recipe, dtype):
    plain, fused = both(recipe, dtype)
    assert_equal(results(fused, *inputs(dtype=dtype)), results(plain, *inputs(dtype=dtype)))


@on_each_recipe
def test_under_torchs_autocast(recipe):
    plain, fused = both(recipe, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        x, dy = inputs(dtype=torch.float32)
        found = results(fused, x, dy)
        assert found[0].dtype == torch.bfloat16
        assert_equal(found, results(plain, x, dy))


@pytest.mark.parametrize("frozen", ["w1", "w3", "w2", "w1 w3", "w1 w2 w3", "x"])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "delayed"])
def test_frozen_weights_and_inputs(recipe, frozen):
    plain, fused = both(recipe, bias=True)
    found = []
    for model in (fused, plain):
        for name in frozen.split():
            if name != "x":
                getattr(model, name).weight.requires_grad_(False)
        x, dy = inputs()
        x.requires_grad_(frozen != "x")
        y = model(x)
        y.backward(dy)
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("recipe", long_but(["rowwise", "delayed"], RECIPES))
def test_compiled_it_is_bitwise_eager_in_one_graph(recipe):
    torch._dynamo.reset()
    _, eager = both(recipe)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for step in range(3 if recipe == "delayed" else 1):
        found = results(compiled, *inputs(step=step), run=run)
        if recipe == "nvfp4":  # compiled random numbers are others
            assert torch.equal(found[0], results(eager, *inputs(step=step))[0])
        else:
            assert_equal(found, results(eager, *inputs(step=step)))
        f8sub.precompute_scales(eager)
        f8sub.precompute_scales(compiled)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@on_each_recipe
def test_checkpointed(recipe, reentrant):
    plain, fused = both(recipe)
    found = results(fused, *inputs(), run=lambda x: checkpoint(fused, x, use_reentrant=reentrant))
    assert_equal(found, results(plain, *inputs()))


def test_without_gradients():
    plain, fused = both("rowwise")
    x, _ = inputs()
    with torch.no_grad():
        assert torch.equal(fused(x), plain(x))
    with torch.inference_mode():
        assert torch.equal(fused(x), plain(x))
    assert fused(x[:0]).shape == (0, *x.shape[1:])
    assert torch.equal(fused(x[0]), plain(x[0]))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "delayed"])
def test_h_and_its_gradients_are_not_saved(recipe):
    """Of the tensors as large as h gate and up alone live on; unfused it is h's codes too."""
    plain, fused = both(recipe)
    x, _ = inputs()
    x.requires_grad_()
    large = TOKENS * HIDDEN
    of_fused, of_plain = (SavedShapes(lambda m=model: m(x)).of_size(large) for model in (fused, plain))
    assert [dtype for _, dtype, _ in of_fused] == [torch.bfloat16] * 2
    assert sum(dtype == torch.float8_e4m3fn for _, dtype, _ in of_plain) == 1


def test_x_is_quantized_once(monkeypatch):
    from f8sub import backends

    _, fused = both("tensorwise")
    seen = []
    quantize = backends.quantize
    monkeypatch.setattr(
        backends, "quantize", lambda x, *rest: seen.append(tuple(x.shape)) or quantize(x, *rest)
    )
    x, _ = inputs()
    fused(x.requires_grad_())
    assert seen.count((TOKENS, WIDTH)) == 1


def ran_fused(model: nn.Module, x: torch.Tensor) -> bool:
    return type(model(x.clone().requires_grad_()).grad_fn).__name__ == f"{_FeedForward.__name__}Backward"


def test_where_each_layer_is_to_be_seen_they_run_one_by_one():
    plain, fused = both("tensorwise")
    x, _ = inputs()
    assert ran_fused(fused, x)
    seen = []
    handle = fused.w3.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    assert not ran_fused(fused, x)
    assert seen
    handle.remove()
    assert ran_fused(fused, x)
    forward = fused.w2.forward
    fused.w2.forward = lambda x: 2 * forward(x)
    assert torch.equal(fused(x), 2 * plain(x))
    del fused.w2.forward
    assert ran_fused(fused, x)
    layer, fused.w1 = fused.w1, checkpoint_wrapper(fused.w1)
    assert not ran_fused(fused, x)
    fused.w1 = layer
    with f8sub.find_nonfinite(fused) as search:
        fused(x.detach() * float("nan")).sum().backward()
    assert "w1" in str(search)


def test_copies_pickles_and_state_dicts():
    plain, fused = both("delayed")
    x, dy = inputs()
    assert list(fused.state_dict()) == list(plain.state_dict())
    right = results(fused, x, dy)
    fused.load_state_dict(plain.state_dict())
    buffer = io.BytesIO()
    pickle.dump(fused, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(fused), pickle.load(buffer)):
        assert isinstance(other, FeedForward)
        assert isinstance(other, FusedFeedForward)
        assert_equal(results(other, x, dy), right)
    assert "fused" in repr(fused)


def test_converted_back_it_is_what_it_was():
    _, fused = both("tensorwise")
    f8sub.convert_from_float8(fused)
    assert type(fused) is FeedForward
    assert not hasattr(fused, "roles")
    x, _ = inputs()
    assert torch.equal(fused(x), F.linear(F.silu(fused.w1(x)) * fused.w3(x), fused.w2.weight))


def test_differentiated_twice():
    _, fused = both("tensorwise")
    x, _ = inputs()
    x.requires_grad_()
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(fused(x).sum(), x, create_graph=True)


FORWARDS = {
    "product the other way": lambda s, x: s.w2(s.w3(x) * F.silu(s.w1(x))),
    "roles the other way": lambda s, x: s.w2(s.w1(x) * F.silu(s.w3(x))),
    "torch.mul": lambda s, x: s.w2(torch.mul(F.silu(s.w1(x)), s.w3(x))),
}
OTHERS = {
    "gelu": lambda s, x: s.w2(F.gelu(s.w1(x)) * s.w3(x)),
    "a residual": lambda s, x: x + s.w2(F.silu(s.w1(x)) * s.w3(x)),
    "a sum": lambda s, x: s.w2(F.silu(s.w1(x)) + s.w3(x)),
    "dropout": lambda s, x: s.w2(F.dropout(F.silu(s.w1(x)) * s.w3(x), 0.1)),
    "two inputs": lambda s, x: s.w2(F.silu(s.w1(x)) * s.w3(x + 1)),
    "control flow": lambda s, x: s.w2(x) if x.sum() > 0 else x,
}


@pytest.mark.parametrize("name", FORWARDS)
def test_what_it_is_recognised_by(name):
    model = f8sub.convert_to_float8(seed_weights(Other(FORWARDS[name])).bfloat16())
    fused = f8sub.fuse_producers(copy.deepcopy(model))
    assert fused.roles.down == "w2"
    assert_equal(results(fused, *inputs()), results(model, *inputs()))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_none_is_named(name):
    model = nn.Sequential(f8sub.convert_to_float8(Other(OTHERS[name])))
    with pytest.raises(Float8ConfigError, match=r"found: 0 \(Other\)"):
        f8sub.fuse_producers(model)
    assert type(model[0]) is Other


def test_transformers_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    model = f8sub.convert_to_float8(LlamaForCausalLM(config).bfloat16())
    fused = f8sub.fuse_producers(copy.deepcopy(model))
    mlps = [layer.mlp for layer in fused.model.layers]
    assert all(isinstance(mlp, FusedFeedForward) for mlp in mlps)
    tokens = torch.randint(128, (2, 16), generator=generator(1))
    losses = [each(tokens, labels=tokens).loss for each in (model, fused)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for ours, theirs in zip(fused.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = FeedForward(), Other(OTHERS["gelu"])


def test_modules_by_name():
    model = f8sub.convert_to_float8(Two())
    with pytest.raises(Float8ConfigError, match=r"second .* does something else: x, w1, .*gelu"):
        f8sub.fuse_producers(model, modules=["first", "second"])
    with pytest.raises(Float8ConfigError, match="no module"):
        f8sub.fuse_producers(model, modules="third")
    assert f8sub.fuse_producers(model, modules="first") is model
    assert isinstance(model.first, FusedFeedForward)
    assert type(model.second) is Other
    with pytest.raises(Float8ConfigError, match="first is fused already"):
        f8sub.fuse_producers(model, modules="nothing")


def test_layers_that_cannot_be():
    for options, reason in (
        ({"recipe": "rowwise_with_gw_hp"}, "wgrad reads in high precision"),
        ({"recipe": {"w1": "rowwise", "*": "tensorwise"}}, "give both one recipe"),
        ({"skip": ("w2",)}, "no module with three float8 layers"),
    ):
        with pytest.raises(Float8ConfigError, match=reason):
            f8sub.fuse_producers(f8sub.convert_to_float8(FeedForward(), **options))
    with pytest.warns(f8sub.Float8Warning, match="re-scales"):
        model = f8sub.convert_to_float8(FeedForward(), recipe="rowwise", keep_x={"w2": "recompute"})
    with pytest.raises(Float8ConfigError, match="w2 with keep_x='recompute', which re-encodes"):
        f8sub.fuse_producers(model)
    model = f8sub.convert_to_float8(nn.Sequential(FeedForward()), skip="w2")
    with pytest.raises(Float8ConfigError, match="w2 as Linear, which is not converted"):
        f8sub.fuse_producers(model, modules="0")
    with pytest.raises(Float8ConfigError, match="Call convert_to_float8 first"):
        f8sub.fuse_producers(nn.Sequential(FeedForward()))


def test_the_gradients_against_float64():
    """Of the function itself: gradients of a loss in float64 within what e4m3 and e5m2 leave of them."""
    _, fused = both("tensorwise", torch.float32)
    x, dy = inputs(dtype=torch.float32)
    found = results(fused, x, dy)
    exact = FeedForward().double()
    exact.load_state_dict({name: value.double() for name, value in fused.state_dict().items()})
    right = results(exact, x.double(), dy.double())
    for ours, theirs in zip(found, right, strict=True):
        noise = (ours.double() - theirs).pow(2).mean() / theirs.pow(2).mean()
        assert noise < 10 ** (-20.0 / 10)


def test_the_shared_input_of_a_feed_forward_is_not_that_of_others():
    """gate and up of two feed-forwards in one scope: each x is its own."""
    model = f8sub.fuse_producers(
        f8sub.convert_to_float8(seed_weights(nn.Sequential(FeedForward(), FeedForward())))
    )
    plain = f8sub.convert_to_float8(seed_weights(nn.Sequential(FeedForward(), FeedForward())))
    x, dy = inputs(dtype=torch.float32)
    assert_equal(results(model, x, dy), results(plain, x, dy))


@on_each_recipe
def test_the_account_of_bytes_knows_that_h_is_not_saved(recipe):
    _, fused = both(recipe)
    x, _ = inputs()
    node = fused(x.requires_grad_()).grad_fn
    parameters = {parameter.untyped_storage()._cdata for parameter in fused.parameters()}
    found = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in node.saved_tensors
    }
    saved = sum(size for address, size in found.items() if address not in parameters)
    gate_and_up = 2 * 2 * TOKENS * HIDDEN
    account = f8sub.conversion_report(fused, TOKENS, shared_inputs=[("w1", "w3")]).bytes
    assert saved - gate_and_up == account.here.saved


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_primary_weights(recipe):
    runs = []
    for fused in (False, True):
        model = seed_weights(FeedForward()).bfloat16()
        model = f8sub.convert_to_float8(model, recipe=recipe, primary_weights=True)
        if fused:
            f8sub.fuse_producers(model)
        optimizer = f8sub.optim.MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-2))
        runs.append([])
        for step in range(3):
            f8sub.precompute_scales(model)
            x, dy = inputs(step=step)
            y = model(x)
            y.backward(dy)
            optimizer.step()
            optimizer.zero_grad()
            runs[-1].append(y.detach())
    assert_equal(*runs)
