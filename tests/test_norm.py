"""A fused norm leaves normalizing to those that read it: the numbers stay those of the modules, bitwise on a CPU."""

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import f8sub
from f8sub.kernels.norms import Norm, by_torch, normalize_backward, rstd_of
from f8sub.norm import FusedNorm
from f8sub.tensor.normed_tensor import NormedTensor
from tests.compiling import SavedShapes
from tests.data_sets import DATA_SETS, make
from tests.dist.models import float8_layers, seed_weights
from tests.selection import long_but
from tests.test_feed_forward import FeedForward, assert_equal, results

WIDTH, TOKENS, EPS = 64, 48, 1e-5
RECIPES = ["tensorwise", "rowwise", "blockwise", "gridquant", "delayed"]
on_each_recipe = pytest.mark.parametrize("recipe", RECIPES)


class LlamaNorm(nn.Module):
    """Of transformers: rounded before the weight multiplies."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class MetaNorm(nn.Module):
    """Of Meta's Llama: the same, written otherwise."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


NORMS = {"torch": nn.RMSNorm, "llama": LlamaNorm, "meta": MetaNorm}
on_each_norm = pytest.mark.parametrize("kind", NORMS)


class Attention(nn.Module):
    """q, k and v of one x; what else reads it is ``extra``."""

    def __init__(self, extra: object = None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (*x.shape[:-1], 4, WIDTH // 4)
        q, k, v = (layer(x).view(heads).transpose(-2, -3) for layer in (self.q, self.k, self.v))
        made = self.o((torch.tanh(q) * k + v).transpose(-2, -3).reshape(x.shape))
        return made if self.extra is None else made + self.extra(x)


class Block(nn.Module):
    def __init__(self, kind: str = "torch", extra: object = None) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = (NORMS[kind](WIDTH, eps=EPS) for _ in range(2))
        self.attention, self.feed_forward = Attention(extra), FeedForward()

    def forward(self, x: torch.Tensor, offset: float = 0.0, **kwargs: object) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x)) + offset
        return x + self.feed_forward(self.ffn_norm(x))


def both(
    recipe: str,
    kind: str = "torch",
    dtype: torch.dtype = torch.bfloat16,
    extra: object = None,
    **options: object,
) -> tuple[nn.Module, nn.Module]:
    """The same modules unfused and fused."""
    model = seed_weights(Block(kind, extra)).to(dtype)
    plain = f8sub.convert_to_float8(model, recipe=recipe, **options)
    fused = f8sub.fuse_producers(copy.deepcopy(plain))
    assert isinstance(fused.attention_norm, FusedNorm)
    assert isinstance(fused.ffn_norm, FusedNorm)
    return plain, fused


def inputs(data: str = "gaussian", step: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [
        make(data, (3, TOKENS // 3, WIDTH), seed, dtype).clamp(-1e4, 1e4) for seed in (step + 1, step + 101)
    ]


def roll_histories(model: nn.Module) -> None:
    """A step that leaves the weights as they are: those of delayed scaling roll once an optimizer stepped."""
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    f8sub.precompute_scales(model)


@on_each_norm
@on_each_recipe
def test_it_is_bitwise_the_modules(recipe, kind):
    plain, fused = both(recipe, kind)
    for step, data in enumerate(DATA_SETS):
        assert_equal(results(fused, *inputs(data, step)), results(plain, *inputs(data, step)))
        roll_histories(plain)
        roll_histories(fused)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@on_each_norm
def test_other_dtypes(kind, dtype):
    plain, fused = both("tensorwise", kind, dtype)
    assert_equal(results(fused, *inputs(dtype=dtype)), results(plain, *inputs(dtype=dtype)))


@on_each_norm
def test_a_weight_of_another_dtype_and_torchs_autocast(kind):
    plain, fused = both("rowwise", kind)
    for model in (plain, fused):
        model.attention_norm.float()
    x, dy = inputs()
    assert not is_left_to_readers(fused.attention_norm, x)
    assert_equal(results(fused, x, dy), results(plain, x, dy))
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(results(fused, x, dy), results(plain, x, dy))


def is_left_to_readers(norm: nn.Module, x: torch.Tensor) -> bool:
    return isinstance(norm(x.clone().requires_grad_()), NormedTensor)


@pytest.mark.parametrize("frozen", ["norm", "layers", "x", "all"])
@on_each_norm
def test_frozen_weights_and_inputs(kind, frozen):
    plain, fused = both("rowwise", kind)
    found = []
    for model in (fused, plain):
        for name, parameter in model.named_parameters():
            is_norms = "norm" in name
            frozen_too = {"norm": is_norms, "layers": not is_norms, "x": False, "all": True}[frozen]
            parameter.requires_grad_(not frozen_too)
        x, dy = inputs()
        x.requires_grad_(frozen in ("norm", "layers"))
        y = model(x)
        if frozen != "all":
            y.backward(dy)
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("recipe", "kind"),
    long_but(
        [("rowwise", "torch")],
        [*((recipe, "torch") for recipe in RECIPES), ("tensorwise", "llama"), ("blockwise", "meta")],
    ),
)
def test_compiled_it_is_bitwise_eager_in_one_graph(recipe, kind):
    torch._dynamo.reset()
    plain, eager = both(recipe, kind)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for step in range(3 if recipe == "delayed" else 1):
        found = results(compiled, *inputs(step=step), run=run)
        assert_equal(found, results(eager, *inputs(step=step)))
        assert_equal(found, results(plain, *inputs(step=step)))
        for model in (plain, eager, compiled):
            roll_histories(model)
    assert recipe != "delayed" or all(s.is_known for layer in float8_layers(eager) for s in layer.states())


@pytest.mark.parametrize(
    "recipe", long_but(["rowwise"], [recipe for recipe in RECIPES if recipe != "delayed"])
)
def test_compiled_siblings_share_one_cast(recipe):
    """q, k and v one, gate and up another; with delayed scaling each layer has a scale of its own."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def count(graph, _):
        casts.append(sum("quantize_normed" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph)

    casts: list[int] = []
    backend = aot_autograd(
        fw_compiler=count,
        bw_compiler=count,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )
    torch._dynamo.reset()
    _, fused = both(recipe)
    results(fused, *inputs(), run=torch.compile(fused, backend=backend, fullgraph=True))
    assert casts == [2, 0]


@pytest.mark.long
@on_each_recipe
def test_modules_compiled_by_themselves_take_what_an_eager_norm_left_to_them(recipe):
    torch._dynamo.reset()
    plain, fused = both(recipe)
    fused.attention.compile(backend="aot_eager", fullgraph=True)
    fused.feed_forward.compile(backend="aot_eager", fullgraph=True)
    assert_equal(results(fused, *inputs()), results(plain, *inputs()))


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@on_each_recipe
def test_checkpointed(recipe, reentrant):
    plain, fused = both(recipe)
    found = results(fused, *inputs(), run=lambda x: checkpoint(fused, x, use_reentrant=reentrant))
    assert_equal(found, results(plain, *inputs()))


def test_checkpointed_by_parts():
    """A function that begins after the norm: its argument is what the norm left to its readers."""
    plain, fused = both("rowwise")

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x + checkpoint(fused.attention, fused.attention_norm(x), use_reentrant=False)
        return x + checkpoint(fused.feed_forward, fused.ffn_norm(x), use_reentrant=False)

    assert_equal(results(fused, *inputs(), run=run), results(plain, *inputs()))


def test_without_gradients():
    plain, fused = both("tensorwise")
    x, _ = inputs()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert type(fused.ffn_norm(x)) is torch.Tensor
            assert torch.equal(fused(x), plain(x))
    assert torch.equal(fused.eval()(x), plain.eval()(x))
    assert fused(x[:0]).shape == (0, *x.shape[1:])
    assert torch.equal(fused(x[0]), plain(x[0]))


READERS = {
    "a sum": lambda x: x * 0.5 + 1,
    "a product with itself": lambda x: (x @ x.transpose(-1, -2)) @ x,
    "another dtype": lambda x: x.float().cumsum(-1).to(x.dtype),
    "another shape": lambda x: x.reshape(-1, 16).softmax(-1).view(x.shape),
    "a part": lambda x: F.pad(x[..., 1:], (1, 0)),
    "two of it": lambda x: torch.cat([x, x], -1)[..., ::2],
}


@pytest.mark.parametrize("reader", READERS)
@on_each_norm
def test_whatever_else_reads_it_has_it_in_high_precision(kind, reader):
    """Within the attention, which is not looked into."""
    plain, fused = both("tensorwise", kind, extra=READERS[reader])
    assert_equal(results(fused, *inputs()), results(plain, *inputs()))


def test_compiled_whatever_else_reads_it_has_it_in_high_precision():
    torch._dynamo.reset()
    plain, fused = both("tensorwise", extra=lambda x: sum(read(x) for read in READERS.values()))
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    assert_equal(results(fused, *inputs(), run=compiled), results(plain, *inputs()))


def test_hooks_see_what_the_modules_made():
    plain, fused = both("tensorwise")
    seen = [[], []]
    for model, found in zip((plain, fused), seen, strict=True):
        model.attention_norm.register_forward_hook(lambda m, args, y, found=found: found.append(y.detach()))
        model.attention.k.register_forward_pre_hook(lambda m, args, found=found: found.append(args[0] * 1))
        model.feed_forward.register_forward_pre_hook(lambda m, args, found=found: found.append(args[0] * 1))
    assert_equal(results(fused, *inputs()), results(plain, *inputs()))
    assert_equal(*seen)
    assert not is_left_to_readers(fused.attention_norm, inputs()[0])
    assert is_left_to_readers(fused.ffn_norm, inputs()[0])


def test_in_contexts_of_other_recipes():
    plain, fused = both("tensorwise")
    x, dy = inputs()
    for options in ({"recipe": "rowwise"}, {"recipe": "mxfp8"}, {"enabled": False}):
        with f8sub.autocast(**options):
            assert_equal(results(fused, x, dy), results(plain, x, dy))


@pytest.mark.parametrize("keep_x", ["float8", "high_precision", "recompute"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_what_the_layers_keep_of_it(recipe, keep_x):
    plain, fused = both(recipe, keep_x={"w2": "auto", "*": keep_x})
    assert_equal(results(fused, *inputs()), results(plain, *inputs()))


def test_layers_of_two_recipes_read_one_norm():
    plain, fused = both({"q": "rowwise", "k": "blockwise", "*": "tensorwise"})
    assert_equal(results(fused, *inputs()), results(plain, *inputs()))


def test_what_is_saved_for_backward():
    """The norm's input, its rstd and codes: nothing of the norm's result in high precision."""
    _, fused = both("rowwise")
    x, _ = inputs()
    x.requires_grad_()
    saved = SavedShapes(lambda: fused.feed_forward(fused.ffn_norm(x)))
    large = {address: dtype for _, dtype, address in saved.of_size(x.numel()) if address != x.data_ptr()}
    assert list(large.values()) == [torch.float8_e4m3fn]
    assert [dtype for _, dtype, _ in saved.of_size(TOKENS)] == [torch.float32]


def test_what_is_written_to_is_told():
    _, fused = both("tensorwise")
    x, _ = inputs()
    x = x.requires_grad_() * 1
    h = fused.ffn_norm(x)
    with pytest.raises(NotImplementedError, match="writes to the result of a fused norm"):
        h += 1
    x += 1
    with pytest.raises(RuntimeError, match="was written to before its result was read"):
        fused.feed_forward(h)


def test_views_of_rows_stay_what_they_are():
    _, fused = both("tensorwise")
    x, _ = inputs()
    h = fused.ffn_norm(x.requires_grad_())
    right = F.rms_norm(x, (WIDTH,), fused.ffn_norm.weight, EPS)
    for view in (h.detach(), h.view(-1, WIDTH), h.view(2, -1, WIDTH)):
        assert isinstance(view, NormedTensor)
        assert torch.equal(view * 1, right.view(view.shape))
    assert torch.equal(h.view(-1, 2 * WIDTH), right.view(-1, 2 * WIDTH))
    assert "eps=1e-05" in repr(h)


def test_copies_pickles_and_state_dicts():
    plain, fused = both("tensorwise", "llama")
    x, dy = inputs()
    assert list(fused.state_dict()) == list(plain.state_dict())
    right = results(fused, x, dy)
    fused.load_state_dict(plain.state_dict())
    buffer = io.BytesIO()
    pickle.dump(fused, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(fused), pickle.load(buffer)):
        assert isinstance(other.ffn_norm, LlamaNorm)
        assert is_left_to_readers(other.ffn_norm, x)
        assert_equal(results(other, x, dy), right)
    assert "norm -> float8" in repr(fused.ffn_norm)
    assert inspect.signature(fused.ffn_norm.forward) == inspect.signature(plain.ffn_norm.forward)
    assert torch.equal(fused.ffn_norm(hidden_states=x), plain.ffn_norm(hidden_states=x))


def test_converted_back_it_is_what_it_was():
    _, fused = both("tensorwise")
    f8sub.convert_from_float8(fused)
    assert type(fused.ffn_norm) is nn.RMSNorm
    assert "measuring" not in vars(fused.ffn_norm)
    assert type(fused.ffn_norm(inputs()[0].requires_grad_())) is torch.Tensor


@pytest.mark.parametrize("rounds", [False, True], ids=["", "rounds"])
def test_against_float64(rounds):
    """Forward within a rounding of its dtype or two, gradients within those of its sums."""
    x, weight, dh = (make("gaussian", (40, 72), seed, torch.float32) for seed in (1, 2, 3))
    x, weight, dh = x.half(), weight[0].half(), dh.half()
    leaves = [x.double().requires_grad_(), weight.double().requires_grad_()]
    right = F.rms_norm(leaves[0], (72,), leaves[1], EPS)
    gradients = torch.autograd.grad(right, leaves, dh.double())
    norm = Norm(EPS, rounds)
    unit = torch.finfo(torch.float16).eps / 2
    # Rounded once, or before the weight multiplies too; float32's roundings are a thousand times smaller.
    torch.testing.assert_close(by_torch(x, weight, norm).double(), right, rtol=2.1 * unit, atol=1e-6)
    found = normalize_backward(dh, x, weight, norm, rstd_of(x, EPS))
    for ours, theirs in zip(found, gradients, strict=True):
        assert (ours.double() - theirs).norm() < 4 * unit * theirs.norm()
