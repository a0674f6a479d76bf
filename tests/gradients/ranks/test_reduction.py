"""Gradients of FSDP2 with e4m3 codes on the wire: the bits are an oracle's, in each way of running FSDP2."""

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.torch_version import TorchVersion

import f8sub
from f8sub.gradients import reduction
from f8sub.gradients.wire import Layout
from tests.data_sets import gaussian, generator
from tests.gradients import oracle
from tests.gradients.models import (
    FLOAT32,
    HIDDEN,
    backward,
    gradients,
    network,
    own_gradients,
    reduced,
    same,
    sharded,
)
from tests.models import Choice
from tests.wire import Wire


def expected(ranks: int, hidden: int = HIDDEN, **options) -> list[torch.Tensor]:
    return [oracle.summed(each, **options) for each in own_gradients(ranks, hidden)]


@pytest.mark.parametrize(("world", "hidden"), [(2, 40), (3, 41), (4, 3)])
def test_bits(rank, world, hidden):
    """Rows that the ranks divide, that they do not, and fewer rows than ranks; twice the same."""
    model = sharded(network(hidden))
    found = reduced(rank, model)
    assert same(found, expected(world, hidden))
    for parameter in model.parameters():
        assert type(parameter.grad.to_local()) is torch.Tensor
        assert parameter.grad.dtype == torch.float32
    for parameter in model.parameters():
        parameter.grad = None
    backward(model, rank)
    assert all(map(torch.equal, gradients(model), found))


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_and_collectives(rank, world):
    """Bytes an element that all ranks' rows have, and what was called."""
    model = sharded(network(512))
    f8sub.reduce_gradients_in_float8(model)
    with Wire() as wire:
        backward(model, rank)
    elements = sum(-(-p.shape[0] // world) * world * p[0].numel() for p in model.parameters())
    calls = dict(wire.calls)
    assert 1 + 1 / 128 <= (wire.output_bytes["alltoall_base_"] / elements) < 1.02
    assert calls["alltoall_base_"] == 2
    assert {name for name in calls if not name.startswith("_allgather")} == {"alltoall_base_"}


class Allocated(MemTracker):
    """The tracker counts what a wrapper's storage would have, and FSDP2's flat buffer of gradients has no memory."""

    def _track(self, reftype, t):
        if not isinstance(t, reduction.GradientBuffer):
            super()._track(reftype, t)


@pytest.mark.parametrize("world", [2])
def test_peak_of_memory(rank, world):
    """Two bytes an element of a module below torch's reduction in bfloat16, as kernels write, which make no copies."""
    width = 512

    def peak(reduce_dtype: torch.dtype, coded: bool) -> int:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6)))
        for layer in (*model, model):
            fully_shard(layer, mp_policy=policy)
        if coded:
            f8sub.reduce_gradients_in_float8(model)
        x, cotangent = (gaussian((1, width), generator(seed)).bfloat16() for seed in (1, 2))
        model(x).backward(cotangent)
        peaks = []
        for _ in range(
            5
        ):  # gloo's threads drop what they sent when they come to it, now and then after the next layer
            model.zero_grad()
            tracker = Allocated()
            tracker.track_external(model)
            with tracker:
                model(x).backward(cotangent)
            peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
        return min(peaks)

    def packed(sources: list, layout: Layout, ranks: int, hosts: int) -> torch.Tensor:
        return torch.zeros(ranks, layout.row_bytes, dtype=torch.uint8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "pack", packed)
        patch.setattr(reduction, "add", lambda received, layout, factor, out: out.zero_())
        float32, bfloat16 = (peak(dtype, False) for dtype in (torch.float32, torch.bfloat16))
        coded = peak(torch.float32, True)
    assert 1.95 * width**2 <= bfloat16 - coded <= 2 * width**2
    assert coded < bfloat16 < float32


def columns(rank: int, world: int) -> None:
    def matrices_by_columns(parameter: nn.Parameter) -> Shard:
        return Shard(1) if parameter.dim() == 2 else Shard(0)

    found = reduced(rank, sharded(network(), shard_placement_fn=matrices_by_columns))
    right = [oracle.summed(each, dim=each[0].dim() - 1) for each in own_gradients(world)]
    assert same(found, right)


def bfloat16(rank: int, world: int) -> None:
    """Gradients of bfloat16 are packed as they are, and the sum has the dtype that the policy asks for."""
    right = own_gradients(world, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=dtype, cast_forward_inputs=False
        )
        model = sharded(network(), policy)
        if dtype is torch.float32:
            f8sub.reduce_gradients_in_float8(model)
        else:
            with pytest.warns(f8sub.Float8Warning, match="rounded to their policy's reduce_dtype"):
                f8sub.reduce_gradients_in_float8(model)
        backward(model, rank, torch.bfloat16)
        assert same(gradients(model), [oracle.summed(each).to(dtype).float() for each in right])


def halves(rank: int, world: int) -> None:
    """FSDP2 divides float16 before and after its sum; here both divide the sum. Since torch 2.15 float16 comes in."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model = sharded(network(), policy)
    with pytest.warns(f8sub.Float8Warning, match="rounded"):
        found = reduced(rank, model)
    own = own_gradients(world)
    if torch.__version__ >= TorchVersion("2.15"):
        own = [[gradient.half() for gradient in each] for each in own]
    right = [oracle.summed(each, factor=0.25).half().float() for each in own]
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-10, atol=2**-20)


def factors(rank: int, world: int) -> None:
    def own(model: nn.Module, factor: float) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)

    for factor in (float(world), 6.0):
        model = sharded(network())
        own(model, factor)
        assert same(reduced(rank, model), expected(world, factor=1 / factor))
    model = sharded(network())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    for ours, right in zip(reduced(rank, model), expected(world, factor=1.0), strict=True):
        assert torch.equal(ours + 0.0, right / world + 0.0)


def accumulated(rank: int, world: int) -> None:
    """Without communication the sum of micro-batches is rounded once; with it each one is."""
    each = [own_gradients_of(world, step) for step in range(2)]
    once = [oracle.summed([a + b for a, b in zip(*pair, strict=True)]) for pair in zip(*each, strict=True)]
    both = [sum(map(oracle.summed, pair)) for pair in zip(*each, strict=True)]
    for sync, right in ((False, once), (True, both)):
        model = sharded(network())
        f8sub.reduce_gradients_in_float8(model)
        with Wire() as wire:
            for step in range(2):
                model.set_requires_gradient_sync(sync or step == 1)
                backward(model, rank + 10 * step)
        assert same(gradients(model), right)
        assert wire.calls["alltoall_base_"] == (4 if sync else 2)


def own_gradients_of(world: int, step: int) -> list[list[torch.Tensor]]:
    found = []
    for rank in range(world):
        model = network()
        backward(model, rank + 10 * step)
        found.append([p.grad for p in model.parameters()])
    return [list(each) for each in zip(*found, strict=True)]


def frozen(rank: int, world: int) -> None:
    """Gradients that are not there are not in FSDP2's list, and one that comes later is."""

    def freeze(model: nn.Module) -> None:
        model[0].weight.requires_grad_(False)
        model[1].bias.requires_grad_(False)

    model = network()
    freeze(model)
    model = sharded(model)
    found = reduced(rank, model)
    assert same(found, [oracle.summed(each) for each in own_gradients(world, change=freeze)])
    model[0].weight.requires_grad_(True)
    model[1].bias.requires_grad_(True)
    for parameter in model.parameters():
        parameter.grad = None
    backward(model, rank)
    assert same(gradients(model), expected(world))


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="FSDP2 has them from torch 2.13 on"
)
def test_fsdp2s_options(rank, world):
    """A process group of its own, two buffers at a time, zeros for what a rank does not use."""
    model = sharded(network())
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(2)
    assert same(reduced(rank, model), expected(world))
    torch.manual_seed(0)
    model = fully_shard(Choice(24), mp_policy=FLOAT32)
    model.set_reduce_scatter_unused_params(True)
    f8sub.reduce_gradients_in_float8(model)
    x, dy = torch.randn(8, 24), torch.randn(8, 24)
    model(x, rank).backward(dy)
    own = dy.t() @ x
    for layer in model.layers:
        right = oracle.summed([own, torch.zeros(24, 24)])
        assert same([layer.weight.grad.full_tensor()], [right])


def replicated(rank: int, world: int) -> list[torch.Tensor]:
    """HSDP: two shard groups whose sums torch adds in float32."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = reduced(rank, sharded(network(), mesh=mesh))
    each = own_gradients(world)
    parts = [[oracle.summed(g[start : start + 2]) for g in each] for start in (0, 2)]
    for ours, first, second in zip(found, *parts, strict=True):
        torch.testing.assert_close(ours, (first + second) / 2, rtol=1e-6, atol=1e-7)
    return found


def test_hsdp(ranks):
    found = ranks(4, replicated)
    assert all(torch.equal(a, b) for other in found for a, b in zip(found[0], other, strict=True))


def replicated_later(rank: int, world: int) -> None:
    """HSDP that accumulates shards and adds replicas at the last micro-batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for reduce in (f8sub.reduce_gradients_in_float8, lambda model: None):
        model = sharded(network(), mesh=mesh)
        reduce(model)
        for step in range(2):
            model.set_requires_all_reduce(step == 1)
            backward(model, rank + 10 * step)
        found.append(torch.cat([g.flatten() for g in gradients(model)]))
    assert oracle.decibels(*found) > 31


def offloaded(rank: int, world: int) -> None:
    model = sharded(network(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert same(reduced(rank, model), expected(world))


def compiled(rank: int, world: int) -> None:
    """A block that torch.compile made: its gradients come from its graph."""
    layers = network()
    block = torch.compile(nn.Sequential(*layers[:2]), backend="aot_eager", fullgraph=True)
    model = nn.Sequential(block, *layers[2:])
    assert same(reduced(rank, sharded(model)), expected(world))


def accumulated_in_two_hops(rank: int, world: int) -> None:
    """Four ranks of two hosts; the sum of micro-batches is what the hosts add."""
    each = [own_gradients_of(world, step) for step in range(2)]
    once = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(*each, strict=True)]
    model = sharded(network())
    f8sub.reduce_gradients_in_float8(model, ranks_per_host=2)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        backward(model, rank + 10 * step)
    assert same(gradients(model), [oracle.summed(own, local=2) for own in once])


def not_finite(rank: int, world: int) -> None:
    """NaN, both infinities, and their difference are where a float32 sum has them; neighbours keep their bits."""
    whole = []
    for index in range(world):
        model = network()
        backward(model, index)
        whole.append([p.grad for p in model.parameters()])
    finite = [oracle.summed(list(each)) for each in zip(*whole, strict=True)]
    nan, inf = float("nan"), float("inf")
    places = [(0, (1, 3), nan), (0, (2, 5), inf), (1, (2, 6), -inf), (0, (3, 7), inf), (1, (3, 7), -inf)]
    for index, place, value in places:
        whole[index][0][place] = value
    model = sharded(network())
    f8sub.reduce_gradients_in_float8(model)
    spoil(model, rank, places)
    guarded = torch.optim.SGD(model.parameters(), lr=1.0)
    guard = f8sub.skip_step_if_nonfinite(guarded)
    backward(model, rank)
    found = gradients(model)
    assert same(found, [oracle.summed(list(each)) for each in zip(*whole, strict=True)])
    bad = ~found[0].isfinite()
    assert bad.nonzero().tolist() == [[1, 3], [2, 5], [2, 6], [3, 7]]
    far = found[0][20:]
    assert torch.equal(far + 0.0, finite[0][20:] + 0.0)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    assert not norm.isfinite()
    before = [p.full_tensor().clone() for p in model.parameters()]
    guarded.step()
    assert int(guard.skipped) == 1
    assert all(map(torch.equal, before, (p.full_tensor() for p in model.parameters())))


def spoil(model: nn.Module, rank: int, places: list) -> None:
    """Have this rank's gradient of the first weight hold the values, after autograd made it."""

    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w.clone()

        @staticmethod
        def backward(ctx, dw):
            dw = dw.clone()
            for index, place, value in places:
                if index == rank:
                    dw[place] = value
            return dw

    layer = model[0]
    layer.forward = lambda x: nn.functional.linear(x, Spoiled.apply(layer.weight), layer.bias)


def in_two_hops(rank: int, world: int, hidden: int) -> tuple[dict[str, int], dict[str, int]]:
    model = sharded(network(hidden))
    reduction = f8sub.reduce_gradients_in_float8(model, ranks_per_host=2, measure=True)
    with Wire() as wire:
        backward(model, rank)
    assert "two hops" in str(reduction)
    assert all(29 < decibels < 45 for decibels in reduction.decibels().values())
    assert same(gradients(model), expected(world, hidden, local=2))
    return dict(wire.calls), dict(wire.output_bytes)


@pytest.mark.parametrize("hidden", [40, 41, 3])
def test_two_hops(ranks, hidden):
    """bfloat16 is added on each of two hosts, and codes of the sums go to the other one; the bits are the oracle's."""
    for calls, _ in ranks(4, in_two_hops, hidden):
        assert calls["alltoall_base_"] == 4


def test_bytes_of_two_hops(ranks):
    """Of a host's bfloat16 ring, whose ranks send the network (hosts - 1) / hosts of the gradients once, 0.51."""
    _, sizes = ranks(4, in_two_hops, 512)[0]
    elements = sum(p.numel() for p in network(512).parameters())
    within, across = 2 * elements, elements / 2  # bf16 of all; a byte of what this rank's host added
    assert within + across <= sizes["alltoall_base_"] <= 1.02 * (within + across)


def measured(rank: int, world: int) -> list[dict[str, float]]:
    model = sharded(network())
    reduction = f8sub.reduce_gradients_in_float8(model, measure=True, measure_every=2)
    assert reduction.decibels() == {}
    found = []
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = None
        with Wire() as wire:
            backward(model, rank + 10 * step)
        assert wire.calls["_reduce_scatter_base_"] == (2 if step % 2 == 0 else 0)
        found.append(reduction.decibels())
    exact = [sum(each) / world for each in own_gradients_of(world, 2)]
    signal, error = (
        sum(t.double().square().sum() for t in some) for some in (exact[:2], errors(model, exact))
    )
    assert found[2]["0"] == pytest.approx(float(10 * torch.log10(signal / error)), abs=0.01)
    return found


def errors(model: nn.Module, exact: list[torch.Tensor]) -> list[torch.Tensor]:
    return [a - b for a, b in zip(gradients(model)[:2], exact[:2], strict=True)]


def test_measured(ranks):
    found = ranks(2, measured)
    assert found[0] == found[1]
    first, second, third = found[0]
    assert set(first) == {"", "0"}
    assert first == second != third
    assert all(29 < value < 45 for each in found[0] for value in each.values())


def with_tensor_parallelism(rank: int, world: int) -> None:
    """Gradients of this rank's parts of the weights, reduced over the data-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for reduce in (f8sub.reduce_gradients_in_float8, lambda model: None):
        source = network(64)
        model = nn.Sequential(source[0], nn.GELU(), source[3])
        styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = sharded(parallelize_module(model, mesh["tp"], styles), mesh=mesh["dp"])
        reduce(model)
        backward(model, mesh["dp"].get_local_rank())
        found.append([p.grad.full_tensor() for p in model.parameters()])
    for ours, right in zip(*found, strict=True):
        assert oracle.decibels(ours, right) > 29


WAYS = {
    columns: 2,
    bfloat16: 2,
    halves: 4,
    factors: 3,
    accumulated: 2,
    frozen: 2,
    replicated_later: 4,
    offloaded: 2,
    compiled: 2,
    accumulated_in_two_hops: 4,
    not_finite: 2,
    with_tensor_parallelism: 4,
}
"""Ways of running FSDP2 and of reducing, each with the number of its ranks."""


@pytest.mark.parametrize("body", WAYS, ids=lambda body: body.__name__)
def test_ways(ranks, body):
    ranks(WAYS[body], body)
