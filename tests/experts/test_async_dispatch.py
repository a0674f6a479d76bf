"""torchtitan's MinimalAsyncEP with tokens in float8, by its own kernels and operators, interpreted on threads."""

import dataclasses
import functools

import pytest
import torch

import f8sub
from scripts.bench.timing import version_of
from tests.data_sets import gaussian, generator
from tests.kernels.interpreted import interpreted
from tests.selection import long_but, of_torchtitan_0_3

INSTALLED = version_of("torchtitan")
pytestmark = pytest.mark.skipif(
    not str(INSTALLED).startswith("0.3."), reason=f"of torchtitan 0.3, here is {INSTALLED}"
)
WIDTH, TOKENS, EXPERTS, TOP_K = 256, 7, 6, 2


def dispatcher_of(mesh, device="cpu"):
    titan = of_torchtitan_0_3("torchtitan.models.common.token_dispatcher")
    config = titan.MinimalAsyncEPTokenDispatcher.Config(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_dim=WIDTH,
        num_max_tokens_per_rank=TOKENS,
        dtype=torch.bfloat16,
        device=torch.device(device),
    )
    dispatcher = titan.MinimalAsyncEPTokenDispatcher(config)
    dispatcher.ep_mesh = mesh
    return dispatcher


def send_in_float8(dispatcher, recipe):
    model = torch.nn.Module()
    model.token_dispatcher = dispatcher
    assert f8sub.dispatch_tokens_in_float8(model, recipe_of(recipe)) == 1


def trained(rank, mesh, recipe, dispatch, combine, device="cpu"):
    """What one rank's experts, which double and shift, get; and y, dx and the gradients of scores."""
    dispatcher = dispatcher_of(mesh, device)
    if device != "cpu":
        dispatcher.init_buffer()
    own = dispatcher.dispatch, dispatcher.combine
    send_in_float8(dispatcher, recipe)
    send = dispatcher.dispatch if dispatch else own[0]
    back = dispatcher.combine if combine else own[1]
    random = generator(rank)
    x = gaussian((TOKENS, WIDTH), random) * (1 + 9 * torch.rand(WIDTH, generator=random))
    x = x.to(device, torch.bfloat16).requires_grad_()
    # Expert 3 has no tokens.
    some = torch.tensor([0, 1, 2, 4, 5])
    chosen = [some[torch.randperm(5, generator=random)[:TOP_K]] for _ in range(TOKENS)]
    chosen = torch.stack(chosen).to(device)
    scores = torch.rand(TOKENS, TOP_K, generator=random).to(device).requires_grad_()
    routed, counts, metadata = send(x, scores, chosen, torch.bincount(chosen.flatten(), minlength=EXPERTS))
    got = routed.detach().clone()
    routed = routed.clone()
    routed.register_hook(lambda gradient: gradients.append(gradient.clone()))
    gradients: list[torch.Tensor] = []
    y = back(routed * 2 + 1, metadata, x)
    y.backward(gaussian((TOKENS, WIDTH), generator(9 + rank)).to(device, torch.bfloat16))
    rows = int(counts.sum())
    return got[:rows], y.detach(), x.grad, scores.grad, gradients[0][:rows], counts


def recipe_of(name):
    """``rowwise``, ``blockwise``, or the first with dy in e5m2."""
    base, *coarse = name.split("+")
    recipe = f8sub.get_recipe(base)
    if not coarse:
        return recipe
    dy = dataclasses.replace(recipe.dgrad.a, dtype=torch.float8_e5m2)
    return dataclasses.replace(recipe, dgrad=dataclasses.replace(recipe.dgrad, a=dy))


def rounded(x, recipe, gemm):
    return f8sub.quantize(x, getattr(recipe_of(recipe), gemm).a).dequantize()


WAYS = [(False, False), (True, False), (False, True), (True, True)]
"""Whether the dispatch and the combine are f8sub's; others are torchtitan's."""


def check(by_way, recipe):
    """Tokens and the gradients of results arrive rounded, and all else is as it was, to the bit."""
    for (got, y, dx, d_scores, d_routed, counts), sent, returned, both in zip(*by_way, strict=True):
        # Each row is one token, so it is rounded alike wherever it goes.
        assert torch.equal(sent[0], rounded(got, recipe, "fprop"))
        assert not torch.equal(sent[0], got)
        assert torch.equal(sent[2], dx)
        assert torch.equal(sent[4], d_routed)
        assert torch.equal(returned[0], got)
        assert torch.equal(returned[1], y)
        assert not torch.equal(returned[2], dx)
        assert torch.equal(returned[3], d_scores)
        assert torch.equal(returned[4], 2 * rounded(d_routed / 2, recipe, "dgrad"))
        for at, kind in ((0, sent), (1, sent), (2, returned), (3, sent), (4, returned)):
            assert torch.equal(both[at], kind[at])
        assert all(torch.equal(other[5], counts) for other in (sent, returned, both))


@pytest.mark.parametrize("recipe", long_but(["rowwise+e5m2"], ["rowwise+e5m2", "rowwise", "blockwise"]))
@interpreted
def test_tokens_and_gradients_arrive_rounded_and_all_else_as_it_was(recipe):
    from tests.experts.async_ep import on_threads

    shape = 3, WIDTH, TOKENS, EXPERTS, TOP_K
    ranks = (functools.partial(trained, recipe=recipe, dispatch=one, combine=other) for one, other in WAYS)
    check([on_threads(*shape, body) for body in ranks], recipe)


def on_a_gpu(rank, world, recipe):
    """What ``trained`` returns of each way, on CPUs, over the memory that ranks share."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (world,), mesh_dim_names=("ep",))
    found = [trained(rank, mesh, recipe, *way, "cuda") for way in WAYS]
    return [[tensor.cpu() for tensor in each] for each in found]


def of_compiled_code(rank, mesh, recipe):
    """y, dx and the gradients of scores, eager and in one graph."""
    found = []
    for backend in (None, "aot_eager"):
        dispatcher = dispatcher_of(mesh)
        send_in_float8(dispatcher, recipe)

        def forward(x, scores, chosen, counts, dispatcher=dispatcher):
            routed, _, metadata = dispatcher.dispatch(x, scores, chosen, counts)
            return dispatcher.combine(routed * 2 + 1, metadata, x)

        if backend is not None:
            forward = torch.compile(forward, backend=backend, fullgraph=True)
        random = generator(rank)
        x = gaussian((TOKENS, WIDTH), random).bfloat16().requires_grad_()
        chosen = torch.stack([torch.randperm(EXPERTS, generator=random)[:TOP_K] for _ in x])
        scores = torch.rand(TOKENS, TOP_K, generator=random).requires_grad_()
        y = forward(x, scores, chosen, torch.bincount(chosen.flatten(), minlength=EXPERTS))
        y.backward(gaussian((TOKENS, WIDTH), generator(9)).bfloat16())
        found.append((y.detach().clone(), x.grad, scores.grad))
    return found


@interpreted
def test_compiled_code_has_the_same_bits():
    """On one rank: what is compiled knows no threads."""
    from tests.experts.async_ep import on_threads

    ((eager, compiled),) = on_threads(
        1, WIDTH, TOKENS, EXPERTS, TOP_K, lambda rank, mesh: of_compiled_code(rank, mesh, "rowwise")
    )
    assert all(torch.equal(one, other) for one, other in zip(eager, compiled, strict=True))


def test_another_torchtitan_is_refused_before_any_dispatcher_is_changed(monkeypatch):
    of_torchtitan_0_3("torchtitan.models.common.token_dispatcher")
    from torchtitan.distributed.minimal_async_ep import api

    monkeypatch.setattr(api, "_dispatch_to_experts", lambda x, ranks, rows: None)
    dispatcher = dispatcher_of(None)
    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    model.layer.token_dispatcher = dispatcher
    message = (
        r"layer\.token_dispatcher: torchtitan\..*api\._dispatch_to_experts .* takes \['x', 'ranks', 'rows'\]"
    )
    with pytest.raises(f8sub.Float8ConfigError, match=message):
        f8sub.dispatch_tokens_in_float8(model, "rowwise")
    assert "dispatch" not in vars(dispatcher)


@interpreted
def test_tokens_that_their_scales_make_longer_are_refused():
    from tests.experts.async_ep import on_threads

    def send(rank, mesh):
        dispatcher = dispatcher_of(mesh)
        send_in_float8(dispatcher, "rowwise")
        x, chosen = torch.ones(TOKENS, 6, dtype=torch.bfloat16), torch.zeros(TOKENS, 1, dtype=torch.int64)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        with pytest.raises(
            f8sub.Float8ConfigError, match=r"tokens of 6 elements .* no longer than .* 16 bytes"
        ):
            dispatcher.dispatch(x, torch.ones(TOKENS, 1), chosen, counts)

    on_threads(1, 6, TOKENS, EXPERTS, 1, send)


@interpreted
def test_to_be_differentiated_twice_is_refused():
    """Of a dispatch, and of a combine."""
    from tests.experts.async_ep import on_threads

    def differentiated_twice(rank, mesh):
        dispatcher = dispatcher_of(mesh)
        send_in_float8(dispatcher, "rowwise")
        x = gaussian((TOKENS, WIDTH), generator(rank)).bfloat16().requires_grad_()
        chosen = torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K) % EXPERTS
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        scores = torch.ones(TOKENS, TOP_K)
        routed, _, metadata = dispatcher.dispatch(x, scores, chosen, counts)
        results = routed.detach().clone().requires_grad_()
        y = dispatcher.combine(results, metadata, x)
        for output, given in ((y, results), (routed, x)):
            with pytest.raises(NotImplementedError, match="create_graph=True asks for twice"):
                torch.autograd.grad(output.sum(), given, create_graph=True)

    on_threads(1, WIDTH, TOKENS, EXPERTS, TOP_K, differentiated_twice)
