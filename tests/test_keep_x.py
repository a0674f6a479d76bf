"""What is kept of x for wgrad: the same numbers whichever way, the bytes of each, and what "auto" chooses."""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import f8sub
from f8sub import scaling_state
from f8sub.formats import why_not_derivable
from tests import oracle
from tests.compiling import compile_blocks
from tests.conversions import mlp, x_of
from tests.counting import FLOAT8, Float8Work
from tests.data_sets import gaussian, generator
from tests.dist.models import seed_weights
from tests.layers import in_float8
from tests.test_saved_bytes import Projections, Saved, bytes_of_saved, leaf

RECIPES = f8sub.recipe_names()
WAYS = ("float8", "high_precision", "recompute")
WIDTH, HEADS, TOKENS = 32, 2, 12
on_each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)
on_each_way = pytest.mark.parametrize("way", WAYS)


def is_derivable(recipe: str) -> bool:
    row, col = f8sub.get_recipe(recipe).formats("x")
    return col is None or why_not_derivable(row, col) is None


def is_exact(recipe: str, way: str) -> bool:
    """Whether a way has the numbers of float8: not where rows' codes are scaled by columns."""
    row, col = f8sub.get_recipe(recipe).formats("x")
    return way != "recompute" or col is None or row.tile.is_transpose_of(col.tile)


EXACT = [(recipe, way) for recipe in RECIPES for way in WAYS[1:] if is_exact(recipe, way)]
RE_ENCODED = [(r, "recompute") for r in RECIPES if is_derivable(r) and not is_exact(r, "recompute")]
on_each_exact_way = pytest.mark.parametrize(("recipe", "way"), EXACT, ids=["-".join(case) for case in EXACT])


class Block(nn.Module):
    """Attention whose result o reads as it is, then an MLP whose relu saves what down reads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.o(self.attention(x))
        return x + self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def model_of(recipe: Any, keep_x: Any, model: nn.Module | None = None) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*re-scales the codes", f8sub.Float8Warning)
        return f8sub.convert_to_float8(seed_weights(model or Blocks()), recipe=recipe, keep_x=keep_x)


def tokens(seed: int = 1) -> torch.Tensor:
    """Of one size but for a few elements."""
    x = gaussian((2, TOKENS, WIDTH), generator(seed))
    x[:, 3, 5] *= 20.0
    return x.requires_grad_()


def trained(
    model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """y, dx and all gradients of three steps, the last ones with scales of the steps before."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        x = tokens(step)
        y = (run or model)(x)
        y.backward(gaussian(tuple(y.shape), generator(10 + step)).to(y.dtype))
        found += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
    assert all(tensor.isfinite().all() for tensor in found)
    return found


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "autocast"])
@on_each_exact_way
def test_all_ways_have_the_same_numbers(recipe, way, dtype):
    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            return model(x)

    model, float8 = model_of(recipe, way), model_of(recipe, "float8")
    found, expected = (trained(each, functools.partial(run, each)) for each in (model, float8))
    assert same(found, expected)
    assert len(found) == 3 * (2 + 8)


@pytest.mark.parametrize("options", [{"hadamard": True}, {"stochastic_rounding": True}], ids=str)
def test_transforms_and_draws_of_dy_are_those_of_float8_too(options):
    recipe, results = f8sub.get_recipe("nvfp4", **options), []
    for way in ("float8", "high_precision"):
        torch.manual_seed(0)
        results.append(trained(model_of(recipe, way)))
    assert same(*results)


def test_the_comparison_sees_another_usage_of_x():
    """The dw of a high-precision wgrad differs from that of a kept x that is cast in backward."""
    mine = f8sub.get_recipe("tensorwise").with_high_precision(wgrad=True)
    assert not same(trained(model_of(mine, "auto")), trained(model_of("tensorwise", "high_precision")))


@pytest.mark.parametrize("recipe", [recipe for recipe, _ in RE_ENCODED])
def test_re_encoded_codes_are_those_that_a_weight_would_have(recipe):
    """dw of codes that were re-scaled by columns, of a float64 oracle that knows nothing of the layer."""
    layer = model_of(recipe, "recompute", nn.Sequential(nn.Linear(WIDTH, 48, bias=False)))
    x, dy = tokens()[0].detach(), gaussian((TOKENS, 48), generator(2))
    layer(x).backward(dy)
    row = f8sub.quantize(x, recipe, operand="x", columnwise=False)
    again = f8sub.quantize(row.dequantize().float(), recipe, operand="x", rowwise=False)
    dy_col = f8sub.quantize(dy, recipe, operand="dy", rowwise=False)
    expected = dy_col.dequantize().double().t() @ again.dequantize().double()
    error = (layer[0].weight.grad.double() - expected).norm() / expected.norm()
    assert error < 1e-5


@on_each_way
@on_each_recipe
def test_bytes_that_one_layer_saves(recipe, way):
    if way == "recompute" and not is_derivable(recipe):
        pytest.skip("refused, see below")
    layer = model_of(recipe, way, nn.Sequential(nn.Linear(64, 96, dtype=torch.bfloat16)))[0]
    x = leaf(4, 24, 64, dtype=torch.bfloat16)
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
    model, x = model_of(recipe, way, Projections()), leaf(48, 64)
    with Float8Work() as work:
        saved = Saved(lambda: model(x), list(model.parameters()))
    alone = model_of(recipe, way, nn.Sequential(nn.Linear(64, 64, bias=False)))
    of_one = Saved(lambda: alone(x), list(alone.parameters())).bytes
    scales = 2 * 4 if way == "high_precision" and recipe == "delayed" else 0  # each has a scale of its own
    assert saved.bytes == of_one + scales
    assert work.casts.count((48, 64)) == 1


def nodes_of(y: torch.Tensor) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """The graph behind y, and what each node saves: without hooks, under which "auto" saves float8."""
    nodes, seen = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        saved = [*saved, *getattr(node, "saved_tensors", ())]
        yield node, [tensor for tensor in saved if isinstance(tensor, torch.Tensor)]


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
    kept = {tensor.dtype for tensor in layer(x.flatten(0, -2)).grad_fn.saved_tensors}
    assert (torch.float8_e4m3fn in kept) != found


def test_auto_in_a_llama_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=48,
        attn_implementation="sdpa",
    )
    model = model_of("tensorwise", "auto", transformers.LlamaForCausalLM(config))
    y = model(torch.randint(48, (2, TOKENS))).logits
    layers = [saved for node, saved in nodes_of(y) if "Float8Matmul" in node.name()]
    without_codes = [saved for saved in layers if all(t.dtype not in FLOAT8 for t in saved)]
    assert len(layers) == 7
    assert [tuple(w.shape) for w, _ in without_codes] == [(64, 64)]


def test_auto_is_float8_under_hooks_which_pack_each_tensor_by_itself():
    model, x = model_of("tensorwise", "auto"), tokens()
    saved = Saved(lambda: model(x), list(model.parameters()))
    float8 = model_of("tensorwise", "float8")
    assert saved.bytes == Saved(lambda: float8(x), list(float8.parameters())).bytes
    assert saved.bytes_in(*FLOAT8) == 2 * TOKENS * (3 * WIDTH + 48)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("way", ["auto", *WAYS])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "gridquant"])
def test_activation_checkpointing(recipe, way, reentrant):
    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x, use_reentrant=reentrant)

    def around_the_last(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """What o reads is made outside of what is repeated."""
        block = model.blocks[0]
        x = x + checkpoint(block.o, block.attention(x), use_reentrant=reentrant)
        return x + block.down(torch.relu(block.up(x)))

    expected = trained(model_of(recipe, "float8"))
    for how in (run, around_the_last):
        model = model_of(recipe, way)
        assert same(trained(model, functools.partial(how, model)), expected)


@pytest.mark.parametrize("way", ["auto", *WAYS])
def test_selective_checkpointing_that_keeps_attention(way):
    kept = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(model, x, use_reentrant=False, context_fn=contexts)

    model = model_of("tensorwise", way)
    assert same(trained(model, functools.partial(run, model)), trained(model_of("tensorwise", "float8")))


@pytest.mark.parametrize("way", ["auto", "high_precision"])
def test_a_delayed_scale_is_that_of_forward_though_histories_rolled_since(way):
    results = []
    for keep_x in ("float8", way):
        model = model_of("delayed", keep_x)
        trained(model)
        x = tokens(7)
        y = model(x)
        states = [state for layer in layers_of(model) for state in layer.states()]
        before = torch.stack([state.scale for state in states])
        scaling_state.roll(states, torch.full((len(states), 3), 1e15))
        assert (torch.stack([state.scale for state in states]) < before / 100).all()
        y.backward(gaussian(tuple(y.shape), generator(9)))
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert same(*results)


@pytest.mark.parametrize("way", ["auto", "high_precision"])
def test_backward_stages_no_amax_of_x(way):
    for model in (model_of("delayed", way), model_of("delayed", "float8")):
        y = model(tokens())
        staged = [state.history_x.clone() for layer in layers_of(model) for state in layer.states()]
        y.sum().backward()
        after = [state.history_x for layer in layers_of(model) for state in layer.states()]
        assert same(after, staged)
        assert all(history[0] > 0 for history in after)


def layers_of(model: nn.Module) -> list[f8sub.Float8Linear]:
    return [module for module in model.modules() if isinstance(module, f8sub.Float8Linear)]


@on_each_way
@on_each_recipe
def test_without_wgrad_nothing_of_x_is_saved(recipe, way):
    if way == "recompute" and not is_derivable(recipe):
        pytest.skip("refused, see below")
    layer = model_of(recipe, way, nn.Sequential(nn.Linear(64, 96, bias=False)))[0]
    x = leaf(24, 64)
    with torch.no_grad():
        assert layer(x).grad_fn is None
    layer.weight.requires_grad_(False)
    saved = Saved(lambda: layer(x), list(layer.parameters()))
    assert saved.bytes == 0
    saved.y.backward(gaussian((24, 96), generator(1)))
    assert x.grad is not None


@on_each_way
def test_frozen_layers_among_siblings(way):
    results = []
    for keep_x in (way, "float8"):
        model = model_of("delayed", keep_x)
        model.blocks[0].q.weight.requires_grad_(False)
        model.blocks[0].down.requires_grad_(False)
        results.append(trained(model))
    assert same(*results)


def test_an_x_that_is_kept_and_changed_is_an_error_as_of_any_linear_layer():
    layer = model_of("tensorwise", "high_precision", nn.Sequential(nn.Linear(64, 96)))
    x = leaf(24, 64) * 1
    y = layer(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


COMPILED = [
    pytest.param(*case, marks=() if case[0] in ("tensorwise", "gridquant") else pytest.mark.long)
    for case in [*EXACT, *((recipe, "auto") for recipe in RECIPES), *RE_ENCODED]
]


@pytest.mark.parametrize(("recipe", "way"), COMPILED)
def test_compiled_code_has_the_same_numbers(recipe, way):
    torch._dynamo.reset()
    same_as = "recompute" if (recipe, way) in RE_ENCODED else "float8"
    eager, compiled = model_of(recipe, same_as), compile_blocks(model_of(recipe, way))
    assert same(trained(compiled), trained(eager))
    torch._dynamo.reset()


def test_contexts_of_other_recipes():
    model, x = model_of("tensorwise", "recompute"), tokens()
    for context in (f8sub.autocast("gridquant"), f8sub.autocast("rowwise_with_gw_hp")):
        with context:
            model(x).sum().backward()
    with f8sub.autocast(enabled=False):
        found = model(x)
    assert torch.equal(found, seed_weights(Blocks())(x))
    with (
        f8sub.autocast("nvfp4"),
        pytest.raises(f8sub.Float8ConfigError, match=r"blocks.0.q.*'nvfp4'.*keep_x='recompute'.*convert the"),
    ):
        model(x)


def test_a_context_keeps_x_as_the_layer_says():
    kept = {}
    for way in ("float8", "high_precision"):
        layer = model_of("tensorwise", way, nn.Sequential(nn.Linear(64, 96)))
        with f8sub.autocast("gridquant"):
            saved = Saved(functools.partial(layer, leaf(24, 64)), list(layer.parameters()))
        kept[way] = saved.bytes
    assert kept == {"float8": 24 * 64 + 4, "high_precision": 24 * 64 * 4}


REFUSED = {
    "nvfp4": ("nvfp4", "recompute", "scales are not powers of two"),
    "float scales": (f8sub.get_recipe("blockwise", power_of_2_scales=False), "recompute", "powers of two"),
    "no cast in fprop": (
        f8sub.get_recipe("tensorwise").with_high_precision(fprop=True),
        "recompute",
        "fprop does not cast x",
    ),
    "no amax in fprop": (
        f8sub.get_recipe("delayed").with_high_precision(fprop=True),
        "high_precision",
        "whose amax delayed scaling takes",
    ),
    "no such word": ("tensorwise", "bf16", "none of 'auto', 'float8', 'high_precision', 'recompute'"),
    "no pattern": ("tensorwise", {3: "auto"}, "keep_x for layers goes by glob patterns.*got 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_the_model_as_it_was(case):
    recipe, keep_x, message = REFUSED[case]
    model = mlp()
    with pytest.raises(f8sub.Float8ConfigError, match=message):
        f8sub.convert_to_float8(model, recipe=recipe, keep_x=keep_x)
    assert type(model.up) is nn.Linear


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_that_are_re_encoded_are_warned_of(recipe):
    if not is_derivable(recipe):
        pytest.skip("refused")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f8sub.convert_to_float8(mlp(), recipe=recipe, keep_x="recompute")
    expected = [] if is_exact(recipe, "recompute") else [f"by columns in 2 layers, up ({recipe}) first"]
    assert [part for part in expected if part in str(caught[0].message)] == expected
    assert len(caught) == len(expected)


def test_layers_by_pattern_and_what_says_so():
    model = mlp()
    with pytest.warns(
        f8sub.Float8Warning, match=r"patterns of keep_x that decide for no layer: 'wo' matches no"
    ):
        f8sub.convert_to_float8(model, keep_x={"down": "high_precision", "wo": "float8"})
    assert (model.up.keep_x, model.down.keep_x) == ("auto", "high_precision")
    assert "keep_x=high_precision" in repr(model.down)
    report = f8sub.conversion_report(model)
    assert [layer.detail.rpartition("keep_x=")[2] for layer in report.layers[:2]] == [
        "auto",
        "high_precision",
    ]
    assert report.idle_patterns == ("'wo' matches no linear layer",)
    f8sub.convert_from_float8(model)
    assert not hasattr(model.down, "keep_x")
    assert torch.equal(model(x_of()), mlp()(x_of()))
