"""Selective checkpointing by the lists of operators that people have: float8 layers repeat what bf16 layers do."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

import f8sub
from tests.counting import Float8Work
from tests.data_sets import gaussian, generator
from tests.selection import long_but

aten = torch.ops.aten
WIDTH, HIDDEN, TOKENS = 64, 128, 32
GEMMS = {"mm", "_scaled_mm", "reference_gemm_nt", "scaled_mm_gemm_nt"}
RECIPES = long_but(
    ("tensorwise", "blockwise"), ["tensorwise", "rowwise", "delayed", "blockwise", "mxfp8", "nvfp4"]
)


class Block(nn.Module):
    """The seven layers of a Llama block; a product of q, k and v stands for attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        h = x + self.o(torch.tanh(self.q(h)) * self.k(h) + self.v(h))
        z = self.norm2(h)
        return h + self.down(F.silu(self.gate(z)) * self.up(z))


def every_second_mm() -> Any:
    """torchtitan 0.2's policy: every second product is made again."""
    seen: Counter[bool] = Counter()

    def decide(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func is not aten.mm.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen[ctx.is_recompute] += 1
        odd = seen[ctx.is_recompute] % 2
        return CheckpointPolicy.MUST_SAVE if odd else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def compute_intensive() -> Any:
    """torchtitan 0.3's policy: torch's own list of operators."""
    saved = {
        op.default if hasattr(op, "default") else op for op in get_default_op_list().compute_intensive_ops
    }
    return create_selective_checkpoint_contexts(
        lambda ctx, func, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE if func in saved else CheckpointPolicy.PREFER_RECOMPUTE
        )
    )


def block(recipe: str | None) -> nn.Module:
    torch.manual_seed(0)
    made = Block().bfloat16()
    return made if recipe is None else f8sub.convert_to_float8(made, recipe, skip_defaults=False)


class Compiled(NamedTuple):
    """Operators of the graphs of a forward and a backward pass; the result, and the gradients of x and the weights."""

    forward: Counter[str]
    backward: Counter[str]
    tensors: list[torch.Tensor]


@functools.cache
def compiled(recipe: str | None, contexts: Callable[[], Any] | None, dynamic: bool | None = None) -> Compiled:
    torch._dynamo.reset()
    operators: list[Counter[str]] = []

    def keep(graph: torch.fx.GraphModule, example: Any) -> Any:
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        operators.append(Counter(t.overloadpacket.__name__ for t in targets if hasattr(t, "overloadpacket")))
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    model = block(recipe)
    policy = {} if contexts is noop_context_fn else {"context_fn": contexts}
    run = functools.partial(checkpoint, model, use_reentrant=False, **policy) if contexts else model
    x = gaussian((TOKENS, WIDTH), generator(1)).bfloat16().requires_grad_()
    y = torch.compile(run, backend=backend, fullgraph=True, dynamic=dynamic)(x)
    y.backward(gaussian(tuple(y.shape), generator(2)).bfloat16())
    forward, backward = operators
    return Compiled(forward, backward, [y, x.grad, *(p.grad for p in model.parameters())])


def compiled_backward(recipe: str | None, contexts: Callable[[], Any] | None) -> Counter[str]:
    return compiled(recipe, contexts).backward


def gemms(counts: Counter[str]) -> int:
    return sum(counts[name] for name in GEMMS)


POLICIES = {
    "every-second-mm": (every_second_mm, 17),
    "torchs-own-list": (compute_intensive, 14),
    "bf16": (f8sub.checkpoint_policy("bf16"), 17),
    "gemms": (f8sub.checkpoint_policy("gemms"), 14),
    "no-policy": (noop_context_fn, 20),
}
"""Products of a backward pass under each. Of bf16 there are 14, and the second, fourth and sixth once more. Without a
policy all but the last, which backward does not read."""


QUICK = [("tensorwise", "every-second-mm"), ("blockwise", "gemms")]
OTHERS = [("tensorwise", "no-policy"), ("blockwise", "torchs-own-list"), ("rowwise", "bf16")]


@pytest.mark.parametrize(("recipe", "policy"), long_but(QUICK, QUICK + OTHERS))
def test_products_of_a_compiled_backward(recipe, policy):
    contexts, products = POLICIES[policy]
    assert gemms(compiled_backward(recipe, contexts)) == products


def test_dynamo_of_torch_2_11_takes_all_that_it_compiles_for_exported(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: torch.compiler.is_dynamo_compiling())
    assert gemms(compiled.__wrapped__("tensorwise", every_second_mm).backward) == 17


DYNAMIC = [("tensorwise", "bf16"), (None, "bf16")]


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "policy"), DYNAMIC)
def test_a_policy_decides_alike_where_shapes_are_dynamic(recipe, policy):
    contexts, _ = POLICIES[policy]
    found, static = compiled(recipe, contexts, dynamic=True), compiled(recipe, contexts)
    assert gemms(found.backward) == gemms(static.backward)
    assert all(torch.equal(a, b) for a, b in zip(found.tensors, static.tensors, strict=True))


@pytest.mark.parametrize("policy", ["every-second-mm", "no-policy"])
def test_products_of_bf16(policy):
    contexts, products = POLICIES[policy]
    assert gemms(compiled_backward(None, contexts)) == products


@pytest.mark.long
def test_a_policy_saves_what_it_is_asked_to_besides():
    policy = f8sub.checkpoint_policy("bf16", save=[aten.mm.default])
    assert gemms(compiled_backward("tensorwise", policy)) == 14


def test_an_unknown_policy_is_refused():
    with pytest.raises(f8sub.Float8ConfigError, match="unknown keep 'all'; choose one of bf16, gemms"):
        f8sub.checkpoint_policy("all")


FOUND = [("tensorwise", every_second_mm), ("delayed", compute_intensive)]


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "contexts"), FOUND)
def test_compiled_backward_finds_no_amax_again(recipe, contexts):
    counts, without = compiled_backward(recipe, contexts), compiled_backward(recipe, None)
    assert counts["amax"] == without["amax"] > 0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("contexts", [every_second_mm, compute_intensive, f8sub.checkpoint_policy("gemms")])
def test_eager_code_repeats_what_the_list_says_and_changes_no_bit(recipe, contexts):
    found = []
    for context_fn in (None, contexts):
        model = block(recipe)
        x = gaussian((TOKENS, WIDTH), generator(1)).bfloat16().requires_grad_()
        y = checkpoint(model, x, use_reentrant=False, context_fn=context_fn) if context_fn else model(x)
        with Float8Work() as seen:
            y.backward(gaussian((TOKENS, WIDTH), generator(2)).bfloat16())
        found.append((y, x.grad, *(p.grad for p in model.parameters())))
        if context_fn and recipe == "tensorwise":
            assert seen.scaled_matmuls == (17 if context_fn is every_second_mm else 14)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_experts_are_chosen_once():
    """What is chosen again of equal scores may be another expert than the one whose tokens were kept."""

    def routed(x: torch.Tensor) -> torch.Tensor:
        return x.topk(2).values.sin()

    calls: Counter[Any] = Counter()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls[func] += 1
            return func(*args, **(kwargs or {}))

    x = gaussian((TOKENS, WIDTH), generator(1)).requires_grad_()
    with Calls():
        y = checkpoint(routed, x, use_reentrant=False, context_fn=f8sub.checkpoint_policy())
        y.backward(gaussian((TOKENS, 2), generator(2)))
    assert calls[aten.topk.default] == 1
