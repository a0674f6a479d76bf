"""Experts under FSDP2: sharded as unsharded to the bit, a byte an element on the wire, one all-reduce a step."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import f8sub
from f8sub.weights.master_weight import MasterWeight
from tests.data_sets import gaussian, generator
from tests.experts.models import OwnExperts
from tests.models import equal, heard, refusal, take_step
from tests.selection import long_but
from tests.wire import Wire

WIDTH, HIDDEN = 128, 256
RECIPES = ["tensorwise", "rowwise", "blockwise", "gridquant", "mxfp8", "delayed"]
GRIDS = [(2, 4), (1, 3), (3, 5), (3, 2), (4, 4), (4, 3), (5, 4), (7, 9)]
"""(ranks, experts): experts that the ranks divide and do not, and ranks that have none."""
CASES = [(*grid, RECIPES[(i + j) % 6]) for i, grid in enumerate(GRIDS) for j in (0, 3)]
"""Two recipes on each; two and four ranks, whose results are the unsharded ones to the bit, have all six."""


class Model(nn.Module):
    """Experts and a linear layer."""

    def __init__(self, experts: int, kind: type[nn.Module] = OwnExperts) -> None:
        super().__init__()
        self.experts, self.head = kind(experts, WIDTH, HIDDEN), nn.Linear(WIDTH, 32, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(gaussian((32, WIDTH), generator(9)) / WIDTH**0.5)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return self.head(self.experts(x, ends))


class TransposedExperts(nn.Module):
    """A user's two products over weights that are stored as (E, K, N)."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        rng = generator(3)
        self.up = nn.Parameter(gaussian((experts, width, hidden), rng) / width**0.5)
        self.down = nn.Parameter(gaussian((experts, hidden, width), rng) / hidden**0.5)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        h = f8sub.grouped_linear(x, self.up, ends, transposed=True).relu()
        return f8sub.grouped_linear(h, self.down, ends, transposed=True)


class SeamedExperts(OwnExperts):
    """Products by a method that is given the transposed weight, as torchtitan's are."""

    def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("what the conversion replaces")

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        h = nn.functional.silu(self._grouped_mm(A=x, B_t=self.gate.transpose(-2, -1), offs=ends))
        h = h * self._grouped_mm(A=x, B_t=self.up.transpose(-2, -1), offs=ends)
        return self._grouped_mm(A=h, B_t=self.down.transpose(-2, -1), offs=ends)


def converted(experts: int, recipe: str, kind: type[nn.Module] = OwnExperts, **options: object) -> Model:
    f8sub.register_experts(kind, transposed=kind is TransposedExperts)
    given = {"experts": True, "skip_defaults": False, "backend": "reference", **options}
    return f8sub.convert_to_float8(Model(experts, kind), recipe, **given)


def batch(experts: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens in uneven groups, some of them empty."""
    rng = generator(100 + step)
    ends = torch.randint(0, 3, (experts,), generator=rng).mul(5).cumsum(0)
    return gaussian((int(ends[-1]) + 3, WIDTH), rng), ends


def trained(model: nn.Module, experts: int, steps: range = range(3), optimizer=None) -> list[torch.Tensor]:
    """Outputs and the x's gradients of some steps; every rank has the same tokens."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in steps:
        f8sub.precompute_scales(model)
        x, ends = batch(experts, step)
        x.requires_grad_()
        y = model(x, ends)
        take_step(optimizer, y.square().mean())
        found += [y.detach(), x.grad]
    return found


def sharded(model: nn.Module, **options: object) -> nn.Module:
    fully_shard(model.experts, **options)
    return fully_shard(model, **options)


def compared(rank: int, world: int, experts: int, recipe: str, kind: type[nn.Module]) -> tuple[bool, str]:
    """Whether three steps are those of experts gathered in high precision, and unsharded where means are exact."""
    found = trained(model := sharded(converted(experts, recipe, kind)), experts)
    plain = trained(sharded(converted(experts, recipe, kind, float8_all_gather=False)), experts)
    is_same = equal(found, plain)
    if world in (1, 2, 4):
        is_same &= equal(found, trained(converted(experts, recipe, kind), experts))
    f8sub.precompute_scales(model)
    model.experts.unshard()
    return is_same, type(next(model.experts.parameters())).__name__


@pytest.mark.parametrize(("world", "experts", "recipe"), long_but(CASES[:9:8], CASES))
def test_sharded_is_unsharded(ranks, world, experts, recipe):
    for is_same, kind in ranks(world, compared, experts, recipe, OwnExperts):
        assert is_same
        assert kind == "Float8Tensor"


TRANSPOSED = [(TransposedExperts, "tensorwise"), (SeamedExperts, "delayed")]
TRANSPOSED += [(kind, recipe) for kind, _ in TRANSPOSED for recipe in ("rowwise", "blockwise", "mxfp8")]


@pytest.mark.parametrize(("kind", "recipe"), long_but(TRANSPOSED[:2], TRANSPOSED))
def test_weights_that_are_stored_or_read_transposed(ranks, kind, recipe):
    for is_same, name in ranks(2, compared, 3, recipe, kind):
        assert is_same
        assert name == "Float8Tensor"


def test_a_scale_of_a_whole_matrix_is_gathered_in_high_precision(rank, world):
    """It is one an expert, and one of all experts' rows would be another."""
    model = sharded(converted(3, "nvfp4"))
    is_same = equal(trained(model, 3), trained(converted(3, "nvfp4"), 3))
    model.experts.unshard()
    assert is_same
    assert not any(isinstance(p, f8sub.Float8Tensor) for p in model.experts.parameters())


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_hsdp(rank, world, recipe):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = trained(sharded(converted(3, recipe), mesh=mesh), 3)
    assert equal(found, trained(converted(3, recipe), 3))


def backward_without_weights(rank: int, world: int, recipe: str, kind: type[nn.Module]) -> str:
    model = sharded(converted(3, recipe, kind))
    model.experts.set_unshard_in_backward(False)
    x, ends = batch(3, 0)
    y = model(x.requires_grad_(), ends)
    dy = gaussian(tuple(y.shape), generator(4))
    with pytest.raises(RuntimeError) as raised:
        y.backward(dy)
    return str(raised.value)


@pytest.mark.parametrize(
    ("recipe", "kind"), [("tensorwise", OwnExperts), ("rowwise", OwnExperts), ("rowwise", TransposedExperts)]
)
def test_experts_that_backward_needs_and_was_told_not_to_gather(ranks, recipe, kind):
    for said in ranks(1, backward_without_weights, recipe, kind):
        assert "backward reads the codes of a gathered weight of shape" in said


def along_rows(weight: nn.Parameter) -> Shard | None:
    return Shard(1) if weight.dim() == 3 else None


def test_swiglu_of_experts_that_tensor_parallelism_cuts(rank, world):
    """Each rank's part of the hidden width, whose y is added over ranks, is what it is as plain tensors."""
    mesh, ends = init_device_mesh("cpu", (world,)), torch.tensor([5, 5, 12])
    x, own = gaussian((15, WIDTH), generator(1)).requires_grad_(), OwnExperts(3, WIDTH, HIDDEN)
    whole = [weight.detach() for weight in (own.gate, own.up, own.down)]
    cut = [
        distribute_tensor(weight, mesh, [Shard(dim)]).requires_grad_()
        for weight, dim in zip(whole, (1, 1, 2), strict=True)
    ]
    plain = [weight.to_local().detach().requires_grad_() for weight in cut]
    dy, found = gaussian((15, WIDTH), generator(2)), []
    for weights in (cut, plain):
        y = f8sub.grouped_swiglu(x, *weights, ends, "tensorwise")
        dx, *gradients = torch.autograd.grad(y, [x, *weights], dy)
        found.append([y, dx, *(dw.to_local() if isinstance(dw, DTensor) else dw for dw in gradients)])
    assert all(map(torch.equal, *found))


ALONG_ROWS = [(2, "tensorwise"), (2, "delayed"), (2, "rowwise"), (1, "rowwise"), (4, "mxfp8")]


@pytest.mark.parametrize(("world", "recipe"), long_but(ALONG_ROWS[:2], ALONG_ROWS))
def test_experts_that_are_sharded_along_their_rows(rank, world, recipe):
    """Three steps, unsharded and sharded; whether the weights were gathered in float8, by one byte an element."""
    model = sharded(converted(3, recipe, OwnExperts), shard_placement_fn=along_rows)
    found, expected = trained(model, 3), trained(converted(3, recipe, OwnExperts), 3)
    f8sub.precompute_scales(model)
    with Wire() as weights:
        model.experts.unshard()
    parameters = list(model.experts.parameters())
    found = [
        equal(found, expected),
        {type(p).__name__ for p in parameters} == {"Float8Tensor"},
        weights.gathered == (sum(p.numel() for p in parameters) if world > 1 else 0),
    ]
    assert all(found), found


KINDS = [(OwnExperts, "delayed"), (SeamedExperts, "rowwise")]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "recipe"), KINDS)
def test_compiled_experts(rank, world, kind, recipe):
    model = converted(3, recipe, kind)
    model.experts.compile(backend="aot_eager", fullgraph=True)
    steps = range(2)  # of other numbers of tokens
    assert equal(trained(sharded(model), 3, steps), trained(sharded(converted(3, recipe, kind)), 3, steps))


def test_tiles_of_several_rows_that_are_sharded_along_them_are_gathered_in_high_precision(rank, world):
    for recipe, kind in (("blockwise", SeamedExperts), ("rowwise", TransposedExperts)):
        with heard() as told:
            model = sharded(converted(3, recipe, kind), shard_placement_fn=along_rows)
        assert {message.partition(":")[0] for message in told} == {
            f"experts.{name} is gathered in high precision" for name, _ in model.experts.named_parameters()
        }
        assert all("shard it along experts" in message for message in told)
        assert equal(trained(model, 3), trained(converted(3, recipe, kind), 3))
        model.experts.unshard()
        assert not any(isinstance(p, f8sub.Float8Tensor) for p in model.experts.parameters())


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_experts_whose_matrices_tensor_parallelism_cuts(rank, world, recipe):
    """As torchtitan cuts them without expert parallelism: rows of gate and up, columns of down."""
    whole = OwnExperts(4, WIDTH, HIDDEN)
    model = converted(4, recipe)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for name, dim in {"gate": 1, "up": 1, "down": 2}.items():
        weight = distribute_tensor(getattr(model.experts, name), mesh["tp"], [Shard(dim)])
        model.experts.register_parameter(name, nn.Parameter(weight))
    fully_shard(model, mesh=mesh["fsdp"])
    model.unshard()
    for name, dim in {"gate": 1, "up": 1, "down": 2}.items():
        gathered = getattr(model.experts, name).to_local()
        assert isinstance(gathered, f8sub.Float8Tensor)
        weight = getattr(whole, name).detach()
        cast = torch.stack([f8sub.quantize(matrix, recipe).dequantize() for matrix in weight])
        expected = cast.chunk(2, dim)[mesh["tp"].get_local_rank()]
        x, ends = gaussian((8, expected.shape[2]), generator(1)), torch.tensor([2, 4, 6, 8])
        y = f8sub.grouped_linear(x, gathered, ends, recipe, backend="reference")
        x = torch.cat([f8sub.quantize(each, recipe).dequantize() for each in x.split(2)])
        by_hand = torch.cat([each @ matrix.t() for each, matrix in zip(x.split(2), expected, strict=True)])
        torch.testing.assert_close(y, by_hand, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", *long_but([], ["rowwise", "mxfp8"])])
def test_a_param_dtype(rank, world, recipe):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = trained(sharded(converted(3, recipe), mp_policy=policy), 3)
    plain = trained(sharded(converted(3, recipe, float8_all_gather=False), mp_policy=policy), 3)
    assert equal(found, plain)


def sent(rank: int, world: int, experts: int, recipe: str) -> tuple[int, int, int]:
    """All-reduces of a precompute, bytes that a gather of the experts fills, and the experts' elements."""
    model = sharded(converted(experts, recipe))
    # Before the forward, after which the root's parameters are those that FSDP2 gathered.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, ends = batch(experts, 0)
    with torch.no_grad():
        model(x, ends)
    optimizer.step()
    with Wire() as scales:
        f8sub.precompute_scales(model)
    with Wire() as weights:
        model.experts.unshard()
    return (
        scales.all_reduces,
        weights.gathered,
        sum(p.numel() for p in OwnExperts(experts, WIDTH, HIDDEN).parameters()),
    )


@pytest.mark.parametrize(
    ("recipe", "least", "most"),
    [("tensorwise", 1.0, 1.0), ("delayed", 1.0, 1.0), ("rowwise", 1.0, 1.0), ("mxfp8", 1.0, 1.13)],
)
def test_what_is_sent(ranks, recipe, least, most):
    for reductions, gathered, elements in ranks(2, sent, 4, recipe):
        assert reductions == 1
        assert least <= gathered / elements <= most


AMAXES = {"tensorwise": (1, 1, 1), "rowwise": (HIDDEN, HIDDEN, WIDTH)}
"""Of one expert's gate, up and down."""


def with_expert_parallelism(rank: int, world: int, recipe: str, dim: int | None) -> list[bool]:
    """y, dx and every weight's gradient of this rank's experts against the whole model's.

    ``dim`` is what FSDP2 shards this rank's experts along; None for expert parallelism alone.
    """
    experts, x_and_ends = 6, batch(6, 1)
    whole = converted(experts, recipe).experts
    x, ends = x_and_ends
    x.requires_grad_()
    dy = gaussian(tuple(x.shape), generator(8))
    y = whole(x, ends)
    y.backward(dy)

    model = converted(experts, recipe).experts
    names = ("ep",) if dim is None else ("fsdp", "ep")
    mesh = init_device_mesh("cpu", (world,) if dim is None else (world // 2, 2), mesh_dim_names=names)
    ep = mesh["ep"]
    for name, parameter in list(model.named_parameters()):
        model.register_parameter(name, nn.Parameter(distribute_tensor(parameter, ep, [Shard(0)])))
    if dim is not None:
        fully_shard(model, mesh=mesh["fsdp"], shard_placement_fn=lambda weight: Shard(dim))
        with Wire() as scales:
            f8sub.precompute_scales(model)
        assert scales.all_reduces == 1
        if recipe in AMAXES:  # of no other ranks' experts, each weight's filled up to four
            entries = [-(-experts // 2 * n // 4) * 4 for n in AMAXES[recipe]]
            assert scales.output_bytes["allreduce_"] == 4 * (sum(entries) + 1)
    here = slice(ep.get_local_rank() * experts // ep.size(), (ep.get_local_rank() + 1) * experts // ep.size())
    first = int(ends[here.start - 1]) if here.start else 0
    rows = slice(first, int(ends[here.stop - 1]))
    part = x[rows].detach().requires_grad_()
    found = model(part, ends[here] - first)
    found.backward(dy[rows])
    results = [torch.equal(found, y[rows]), torch.equal(part.grad, x.grad[rows])]
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        results.append(torch.equal(gradient.full_tensor(), getattr(whole, name).grad))
    return results


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", *long_but([], ["blockwise", "mxfp8"])])
@pytest.mark.parametrize(("world", "dim"), [(2, None), (4, 0), (4, 1)])
def test_expert_parallelism(ranks, world, dim, recipe):
    if dim == 1 and recipe == "blockwise":
        pytest.skip("blocks of several rows are not sharded along them")
    for results in ranks(world, with_expert_parallelism, recipe, dim):
        assert all(results), results


def cut_among_ranks(model: nn.Module, names: tuple[str, ...], world: int, dim: int = 0) -> DeviceMesh:
    """Expert parallelism, and FSDP2 where ``names`` has its dimension; the mesh of expert parallelism."""
    sizes = (world,) if len(names) == 1 else (world // 2, 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for name, parameter in list(model.named_parameters()):
        model.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh["ep"], [Shard(0)])))
    if "fsdp" in names:
        fully_shard(model, mesh=mesh["fsdp"], shard_placement_fn=lambda weight: Shard(dim))
    return mesh["ep"]


class Sent(OwnExperts):
    """Experts of tokens whose number a rank knows when it has them, as where other ranks send them."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return super().forward(x[torch.arange(int(ends[-1]))], ends)


class SentToSwiglu(Sent):
    """One node of all products."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return f8sub.grouped_swiglu(x[torch.arange(int(ends[-1]))], self.gate, self.up, self.down, ends)


COMPILED = [
    *((2, names, SentToSwiglu, "tensorwise") for names in (("ep",), ("fsdp", "ep"))),
    *((2, ("fsdp", "ep"), Sent, recipe) for recipe in ("rowwise", "mxfp8")),
    *((4, ("fsdp", "ep"), SentToSwiglu, recipe) for recipe in ("tensorwise", "blockwise")),
]


@pytest.mark.parametrize(("world", "names", "kind", "recipe"), long_but(COMPILED[1:3], COMPILED))
def test_compiled_expert_parallelism(rank, world, names, kind, recipe):
    """Two steps of other numbers of tokens are eager code's to the bit, and so is a forward without gradients."""
    found = []
    for compiles in (False, True):
        model = converted(6, recipe, kind).experts
        ep = cut_among_ranks(model, names, world)
        if compiles:
            model.compile(backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        of_this: list[torch.Tensor] = []
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            for step in range(2):
                f8sub.precompute_scales(model)
                x, ends = batch(3, 10 * step + ep.get_local_rank())
                y = model(x.requires_grad_(), ends)
                dy = gaussian(tuple(y.shape), generator(step))
                y.backward(dy)
                of_this += [y.detach(), x.grad, *(p.grad.full_tensor() for p in model.parameters())]
                optimizer.step()
                optimizer.zero_grad()
            f8sub.precompute_scales(model)
            with torch.no_grad():
                of_this.append(model(x, ends))
        found.append(of_this)
    assert all(map(torch.equal, *found))


def histories(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if "scaling_states" in name}


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize(("experts", "dim"), long_but([(5, 0)], [(6, 0), (6, 1), (5, 0)]))
def test_delayed_scaling_under_expert_parallelism(rank, world, experts, dim, tmp_path):
    """Every rank has the past of all experts, as the unsharded model has it; and so has its checkpoint.

    Three steps with delayed scaling under expert parallelism and FSDP2, and one more from its checkpoint.
    """
    folder = str(tmp_path)
    wrong: list[str] = []
    whole, model = (converted(experts, "delayed").experts for _ in range(2))
    ep = cut_among_ranks(model, ("fsdp", "ep"), world, dim)
    here = slice(ep.get_local_rank() * 3, min((ep.get_local_rank() + 1) * 3, experts))

    def step(number: int, model: nn.Module) -> None:
        x, ends = batch(experts, number)
        x, dy = x * 2.0**number, gaussian(tuple(x.shape), generator(8 + number))
        first = int(ends[here.start - 1]) if here.start else 0
        rows = slice(first, int(ends[here.stop - 1]))
        parts = ((whole, x, ends, slice(None)), (model, x[rows], ends[here] - first, rows))
        found = []
        for each, given, of_each, own in parts:
            given = given.clone().requires_grad_()
            y = each(given, of_each)
            y.backward(dy[own])
            found.append((y.detach(), given.grad))
        for a, b in zip(*found, strict=True):
            wrong.extend([f"step {number}"] * (not torch.equal(a[rows], b)))

    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (whole, model)]
    for number in range(3):
        step(number, model)
        for each, optimizer in zip((whole, model), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            f8sub.precompute_scales(each)
    found, expected = histories(model), histories(whole)
    wrong += [name for name, value in expected.items() if not torch.equal(found[name], value)]
    wrong += ["no past"] * (not all(value.any() for name, value in found.items() if "history_x" in name))

    dcp.save(model.state_dict(), checkpoint_id=folder)
    unsharded = converted(experts, "delayed").experts
    state = unsharded.state_dict()
    dcp.load(state, checkpoint_id=folder)
    unsharded.load_state_dict(state)
    loaded = histories(unsharded)
    wrong += [f"loaded {name}" for name, value in expected.items() if not torch.equal(loaded[name], value)]
    resumed = converted(experts, "delayed").experts
    cut_among_ranks(resumed, ("fsdp", "ep"), world, dim)
    state = resumed.state_dict()
    dcp.load(state, checkpoint_id=folder)
    resumed.load_state_dict(state)
    step(3, resumed)
    assert wrong == []


def test_delayed_scaling_has_no_past_of_other_ranks_experts_without_fsdp(rank, world):
    model = converted(4, "delayed").experts
    cut_among_ranks(model, ("ep",), world)
    message = refusal(
        f8sub.Float8ConfigError, model, gaussian((2, WIDTH), generator(0)), torch.tensor([1, 2])
    )
    assert "where expert parallelism alone cuts the weight" in message


def saved(rank: int, world: int, folder: str, recipe: str) -> dict[str, torch.Tensor]:
    model = sharded(converted(5, recipe))
    trained(model, 5)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def resumed(rank: int, world: int, folder: str, recipe: str) -> list[torch.Tensor]:
    """Two steps of SGD from the checkpoint; every rank has the same tokens."""
    model = sharded(converted(5, recipe)) if world > 1 else converted(5, recipe)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder, no_dist=world == 1)
    model.load_state_dict(state)
    return trained(model, 5, range(3, 5), torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("recipe", ["delayed", *long_but([], ["rowwise", "tensorwise", "mxfp8"])])
def test_a_checkpoint_goes_on_in_another_world(ranks, tmp_path, recipe):
    (full, _) = ranks(2, saved, str(tmp_path), recipe)
    assert all(type(value) is torch.Tensor for value in full.values())
    assert {key for key in full if "scaling_states" not in key} == Model(5).state_dict().keys()
    assert full.keys() == converted(5, recipe).state_dict().keys()
    expected = ranks(1, resumed, str(tmp_path), recipe)[0]
    for world in (2, 4):
        for found in ranks(world, resumed, str(tmp_path), recipe):
            assert equal(found, expected)


def test_weights_that_are_assigned(rank, world):
    """Experts made on meta, with a state dict assigned once they are sharded."""
    state = copy.deepcopy(converted(3, "rowwise").state_dict())
    with torch.device("meta"):
        empty = Model(3)
    f8sub.register_experts(OwnExperts)
    model = sharded(
        f8sub.convert_to_float8(empty, "rowwise", experts=True, skip_defaults=False, backend="reference")
    )
    parameters = dict(model.named_parameters())
    state = {
        n: distribute_tensor(v, parameters[n].device_mesh, parameters[n].placements) for n, v in state.items()
    }
    model.load_state_dict(state, assign=True)
    assert equal(trained(model, 3), trained(converted(3, "rowwise"), 3))
    assert isinstance(model.experts.up._local_tensor, MasterWeight)


def test_nan_names_the_weight(rank, world):
    model = sharded(converted(4, "rowwise"))
    trained(model, 4, range(1))
    if rank == 1:
        with torch.no_grad():
            model.experts.up.to_local()[0, 0, 0] = torch.inf
    dist.barrier()
    trained_once = torch.optim.SGD(model.parameters(), lr=0.0)
    trained_once.step()
    f8sub.precompute_scales(model)
    message = refusal(f8sub.Float8NumericsError, lambda: [f8sub.precompute_scales(model) for _ in range(2)])
    assert "experts.up" in message


def test_ranks_that_were_converted_differently_are_told(rank, world):
    model = sharded(converted(4, ["rowwise", "tensorwise"][rank]))
    message = refusal(f8sub.Float8RankMismatchError, f8sub.precompute_scales, model)
    assert "experts" in message or "head" in message
