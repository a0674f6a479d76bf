"""Tokens that cross in float8: half the bytes, y and dx to the bit, dw but for the smallest elements."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import refusal
from tests.selection import of_torchtitan_0_3
from tests.wire import Wire

WIDTH, HIDDEN, EACH = 256, 128, 2
"""Experts of each rank: ``EACH``."""
COUNTS = [[3, 0, 20, 1, 4, 2], [0, 0, 7, 9, 1, 1], [5, 6, 0, 0, 0, 2]]
"""Tokens that each rank has for each of six experts: one rank sends nothing to another."""


def counted(rank: int, world: int) -> tuple[list[int], list[int], list[int]]:
    """Rows for each rank, rows from each, and the tokens of this rank's experts, by the rank that they are from."""
    sent = [sum(COUNTS[rank][other * EACH :][:EACH]) for other in range(world)]
    parts = [COUNTS[other][rank * EACH :][:EACH] for other in range(world)]
    return sent, [sum(part) for part in parts], [count for part in parts for count in part]


def by_expert(counts: list[int], world: int) -> torch.Tensor:
    """The rows as they came, by rank, in the order of the experts."""
    starts = torch.tensor([0, *counts]).cumsum(0)
    order = [rank * EACH + expert for expert in range(EACH) for rank in range(world)]
    return torch.cat([torch.arange(int(starts[i]), int(starts[i + 1])) for i in order])


def exchanged(tokens: torch.Tensor, received: list[int], sent: list[int], recipe: str | None, combine: bool):
    if recipe is not None:
        return f8sub.exchange_tokens(tokens, received, sent, recipe=recipe, combine=combine)
    return AsTheyAre.apply(tokens, received, sent)


class AsTheyAre(torch.autograd.Function):
    """The same all-to-all in high precision: what an exchange in float8 is compared with."""

    @staticmethod
    def forward(ctx, tokens, received, sent):
        ctx.splits = received, sent
        out = tokens.new_empty(sum(received), tokens.shape[1])
        dist.all_to_all_single(out, tokens.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, dy):
        received, sent = ctx.splits
        out = dy.new_empty(sum(sent), dy.shape[1])
        dist.all_to_all_single(out, dy.contiguous(), sent, received)
        return out, None, None


def spread(cols: int, seed: int) -> torch.Tensor:
    """Columns of many sizes: small ones are subnormal under the scales of rows."""
    return (3 * gaussian((1, cols), generator(seed))).exp()


def trained(
    rank: int, world: int, recipe: str, in_float8: bool, dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    """y, dx and dw of this rank's tokens and experts."""
    sent, received, counts = counted(rank, world)
    x = (gaussian((sum(sent), WIDTH), generator(rank)) * spread(WIDTH, 30 + rank)).to(device, dtype)
    x.requires_grad_()
    dy = (gaussian((sum(sent), HIDDEN), generator(10 + rank)) * spread(HIDDEN, 40)).to(device, dtype)
    weight = nn.Parameter(gaussian((EACH, HIDDEN, WIDTH), generator(20 + rank)).to(device, dtype))
    order = by_expert(counts, world).to(device)
    ends = torch.tensor([sum(counts[e::EACH]) for e in range(EACH)]).cumsum(0).to(device)
    wire = recipe if in_float8 else None
    tokens = exchanged(x, received, sent, wire, combine=False)[order]
    y = f8sub.grouped_linear(tokens, weight, ends, recipe, backend="reference")
    back = torch.empty_like(y).index_copy(0, order, y)
    y = exchanged(back, sent, received, wire, combine=True)
    y.backward(dy)
    return [y.detach(), x.grad, weight.grad]


def compared(
    rank: int, world: int, recipe: str, dtype: torch.dtype, device: str = "cpu"
) -> tuple[bool, bool, float]:
    found, expected = (trained(rank, world, recipe, wire, dtype, device) for wire in (True, False))
    error = (found[2] - expected[2]).float().norm() / expected[2].float().norm()
    return torch.equal(found[0], expected[0]), torch.equal(found[1], expected[1]), float(error)


def check(found: list[tuple[bool, bool, float]]) -> None:
    assert all(same_y and same_dx for same_y, same_dx, _ in found)
    assert 0 < max(error for *_, error in found) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_y_and_dx_are_those_of_tokens_that_are_sent_as_they_are(ranks, recipe, dtype):
    check(ranks(3, compared, recipe, dtype))


def narrow(rank: int, world: int, recipe: str) -> bool:
    """Rank 0 receives one row, rank 1 none, of a width that 4 does not divide."""
    x = gaussian((1 - rank, 50), generator(1)).bfloat16()
    y = exchanged(x, [1 - rank, 0], [1 - rank, 0], recipe, combine=False)
    return y.shape == x.shape and (rank == 1 or torch.equal(y, f8sub.quantize(x, recipe).dequantize()))


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_one_row_and_none(ranks, recipe):
    assert ranks(2, narrow, recipe) == [True, True]


def sent_bytes(rank: int, world: int, recipe: str | None) -> tuple[int, int]:
    sent, received, _ = counted(rank, world)
    x = gaussian((sum(sent), WIDTH), generator(rank)).bfloat16()
    with Wire() as wire:
        exchanged(x, received, sent, recipe, combine=False)
    name = "alltoall_base_" if recipe is None else "all_to_all_single"
    return wire.calls[name], wire.output_bytes[name]


@pytest.mark.parametrize(("recipe", "share"), [("rowwise", 0.508), ("blockwise", 0.516)])
def test_half_the_bytes_in_one_collective(ranks, recipe, share):
    """Four bytes of scale for each 256 or 128 codes."""
    for (calls, found), (_, in_bf16) in zip(
        ranks(3, sent_bytes, recipe), ranks(3, sent_bytes, None), strict=True
    ):
        assert calls == 1
        assert found / in_bf16 == pytest.approx(share, abs=5e-4)


def checkpointed(rank: int, world: int) -> tuple[list[int], bool]:
    """How often rows cross without a policy, by one that keeps what all-to-alls return, as torchtitan's does, and by
    f8sub's; and whether the bits are the same."""
    sent, received, _ = counted(rank, world)
    kept = torch.ops._c10d_functional.all_to_all_single.default

    def policy(ctx: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator == kept else CheckpointPolicy.PREFER_RECOMPUTE

    def body(x: torch.Tensor) -> torch.Tensor:
        tokens = exchanged(x, received, sent, "rowwise", combine=False).tanh()
        # Backward of the sine reads what was combined.
        return exchanged(tokens, sent, received, "rowwise", combine=True).sin()

    contexts = functools.partial(create_selective_checkpoint_contexts, policy), f8sub.checkpoint_policy()
    checkpoints = [functools.partial(checkpoint, body, use_reentrant=False, context_fn=c) for c in contexts]
    found = []
    for run in (body, *checkpoints):
        x = gaussian((sum(sent), WIDTH), generator(rank)).bfloat16().requires_grad_()
        with Wire() as wire:
            y = run(x)
            y.backward(gaussian(tuple(y.shape), generator(3 + rank)).bfloat16())
        found.append((y, x.grad, wire.calls["all_to_all_single"]))
    same = all(torch.equal(each[at], found[0][at]) for each in found for at in (0, 1))
    return [calls for *_, calls in found], same


def test_a_selective_checkpoint_sends_nothing_again(ranks):
    assert ranks(2, checkpointed) == [([4, 4, 4], True)] * 2


def numbers(rank: int, world: int) -> tuple[bool, list[str]]:
    """Rows counted by numbers of tensors and of numpy; and what is refused."""
    x = gaussian((3, WIDTH), generator(rank)).requires_grad_()
    received = [2, 2] if rank == 0 else [1, 1]
    as_numbers = torch.tensor(received), torch.tensor([2, 1]).numpy()
    y = exchanged(x, *as_numbers, "rowwise", combine=False)
    same = torch.equal(y, exchanged(x, received, [2, 1], "rowwise", combine=False))
    twice = []
    for combine in (False, True):
        y = exchanged(x, received, [2, 1], "rowwise", combine)
        dy = torch.ones_like(y).requires_grad_()
        ask = functools.partial(torch.autograd.grad, y, x, dy, create_graph=True)
        twice.append(refusal(NotImplementedError, ask))
    scalar = refusal(f8sub.Float8ShapeError, exchanged, torch.tensor(1.0), received, [2, 1], "rowwise", False)
    return same, [*twice, scalar]


def test_numbers_of_any_kind_and_what_is_refused(ranks):
    for same, (dispatched, combined, scalar) in ranks(2, numbers):
        assert same
        assert "experts are differentiated once" in dispatched
        assert "experts are differentiated once" in combined
        assert "3 by input_splits, got ()" in scalar


def compiled(rank: int, world: int, recipe: str, backend: str) -> bool:
    """Rows that each call has in another number, which is not known while code is traced."""

    def exchange(x: torch.Tensor, sent: torch.Tensor, received: torch.Tensor, combine: bool) -> torch.Tensor:
        return f8sub.exchange_tokens(x, received.tolist(), sent.tolist(), recipe=recipe, combine=combine) * 2

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        in_one_graph = torch.compile(exchange, backend=backend, fullgraph=True)
        same = []
        for step in range(2):
            counts = torch.tensor([[3 + other + step, 5 * other] for other in range(world)])
            sent, received = counts[rank], counts[:, rank].clone()
            for combine in (False, True):
                found = []
                for call in (exchange, in_one_graph):
                    x = gaussian((int(sent.sum()), WIDTH), generator(rank)).bfloat16().requires_grad_()
                    y = call(x, sent, received, combine)
                    y.backward(gaussian(tuple(y.shape), generator(3 + rank)).bfloat16())
                    found.append((y, x.grad))
                same += [torch.equal(one, other) for one, other in zip(*found, strict=True)]
    return all(same)


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [("rowwise", "aot_eager"), pytest.param("blockwise", "inductor", marks=pytest.mark.long)],
)
def test_compiled_code_sends_the_same_bits(ranks, recipe, backend):
    assert ranks(2, compiled, recipe, backend) == [True, True]


class Routed(nn.Module):
    """Holds a dispatcher as torchtitan's routed experts do, with experts that double."""

    def __init__(self, dispatcher: object) -> None:
        super().__init__()
        self.token_dispatcher = dispatcher

    def forward(self, x: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(chosen.flatten(), minlength=self.token_dispatcher.num_experts)
        routed, _, metadata = self.token_dispatcher.dispatch(x, scores, chosen, counts)
        return self.token_dispatcher.combine(routed * 2, metadata, x)


def padding(rank: int, world: int) -> tuple[int, bool, bool, list[str]]:
    """torchao's dispatcher, which fills each expert's tokens up to multiples of 16; its indices by its CPU's code."""
    from torchao.prototype.moe_training.ep import permute
    from torchtitan.models.common.token_dispatcher import TorchAOTokenDispatcher

    permute.generate_permute_indices = functools.partial(permute.generate_permute_indices, use_cpu=True)
    config = TorchAOTokenDispatcher.Config(num_experts=4, top_k=2, pad_multiple=16)
    return of_torchtitan(rank, world, lambda: TorchAOTokenDispatcher(config))


def all_to_all(rank: int, world: int) -> tuple[int, bool, bool, list[str]]:
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    return of_torchtitan(
        rank,
        world,
        lambda: AllToAllTokenDispatcher(AllToAllTokenDispatcher.Config(num_experts=4, top_k=2)),
    )


def of_torchtitan(rank: int, world: int, make: Callable[[], Any]) -> tuple[int, bool, bool, list[str]]:
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")  # spmd_types' own all-to-all of uneven rows fails on gloo
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    found = []
    for in_float8 in (False, True):
        model = Routed(make())
        model.token_dispatcher.wire_meshes(ep_mesh=mesh)
        count = f8sub.dispatch_tokens_in_float8(model, "rowwise") if in_float8 else 0
        x = gaussian((12, WIDTH), generator(rank)).bfloat16()
        given = x if in_float8 else f8sub.quantize(x, "rowwise").dequantize()
        chosen = torch.randint(0, 4, (12, 2), generator=generator(rank))
        scores = gaussian((12, 2), generator(5 + rank)).requires_grad_()
        given = given.detach().requires_grad_()
        y = model(given, scores, chosen)
        y.backward(gaussian((12, WIDTH), generator(7)).bfloat16())
        found.append((y, given.grad))
    (expected, dx), (y, rounded_dx) = found
    error = (rounded_dx - dx).float().norm() / dx.float().norm()
    refused = [
        refusal(f8sub.Float8ConfigError, f8sub.dispatch_tokens_in_float8, nn.Linear(1, 1), "rowwise"),
        refusal(f8sub.Float8ConfigError, f8sub.dispatch_tokens_in_float8, model, "tensorwise"),
        refusal(f8sub.Float8ShapeError, exchanged, x, [1] * world, [1] * world, "rowwise", False),
    ]
    return count, torch.equal(y, expected), 0 < float(error) < 0.05, refused


@pytest.mark.parametrize("body", [all_to_all, padding])
def test_torchtitans_dispatchers(ranks, body):
    of_torchtitan_0_3("torchtitan.models.common.token_dispatcher")
    for count, same_y, near_dx, refused in ranks(2, body):
        assert count == 1
        assert same_y
        assert near_dx
        for message, words in zip(
            refused, ("AllToAllTokenDispatcher", "a power of two", "by input_splits"), strict=True
        ):
            assert words in message


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("DeepEPTokenDispatcher", "sends tokens by kernels of its own"),
        ("HybridEPTokenDispatcher", "sends tokens by kernels of its own"),
        ("LocalTokenDispatcher", "sends no tokens to other ranks"),
    ],
)
def test_dispatchers_of_other_kernels_are_refused_before_any_is_changed(kind, words):
    """Their own constructors want packages or GPUs that are not here."""
    titan = of_torchtitan_0_3("torchtitan.models.common.token_dispatcher")
    known = titan.AllToAllTokenDispatcher(titan.AllToAllTokenDispatcher.Config(num_experts=4, top_k=2))
    other = object.__new__(getattr(titan, kind))
    if kind != "LocalTokenDispatcher":
        other.ep_mesh = None
    model = nn.ModuleDict({"layer": Routed(known), "other": Routed(other)})
    message = refusal(f8sub.Float8ConfigError, f8sub.dispatch_tokens_in_float8, model, "rowwise")
    assert message.startswith(f"other.token_dispatcher, a {kind}, {words}")
    assert "AllToAllTokenDispatcher" in message
    assert "f8sub.exchange_tokens" in message
    assert "_dispatch_token_exchange" not in vars(known)
