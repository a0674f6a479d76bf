"""What arrives is what was sent: gathered codes and scales are those of the full weight, bit for bit."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import f8sub
from f8sub.convert import selection
from f8sub.weights import shard as shards
from tests import oracle
from tests.data_sets import gaussian, generator, lognormal, spread_columns
from tests.kernels.products import bits
from tests.models import BF16, Stack, equal, replicated, seed_weights, shard
from tests.selection import long_but
from tests.wire import ONE_RECIPE_A_WIRE, QUICK

RECIPES = (*ONE_RECIPE_A_WIRE, "delayed")
"""The other recipes' weights are sent alike, see ``test_wire``."""
COLUMNS, MULTIPLE = 48, 16
ROWS = [528, 192, 144, 80, 16, 129, 33, 5]
"""Some ranks are short and some empty. No layer is converted whose rows are no multiple of 16, since no matmul of a GPU
takes them: of the last ones the sharded weight alone is looked at."""

on_each_recipe = pytest.mark.parametrize("recipe", long_but((*QUICK, "blockwise"), RECIPES))
"""By default those of ``on_each``, and tiles of which several shards hold rows."""

SHORT = [("tensorwise", 2), ("mxfp8", 3), ("delayed", 2), ("blockwise", 3)]
CASES = [*SHORT, *((recipe, world) for recipe in RECIPES for world in (2, 3))]
CASES += [("tensorwise", 1), ("mxfp8", 1), ("mxfp8", 5), ("blockwise", 7)]
on_each_recipe_and_world = pytest.mark.parametrize(("recipe", "world"), long_but(SHORT, dict.fromkeys(CASES)))
"""Five and seven ranks of tiles that several shards hold, and of scales that follow the codes of a row."""
LAID_OUT = [("tensorwise", "columns", 3), ("mxfp8", "2 replicas", 4), ("blockwise", "4 replicas", 4)]
LAID_OUT += [("nvfp4", "columns", 2), ("mxfp8", "columns", 2)]
LAID_OUT += [(recipe, "columns", 3) for recipe in ("rowwise", "blockwise", "delayed")]


def full_weight(rows: int) -> torch.Tensor:
    """Rows and columns of very different sizes, the largest element in the last row."""
    weight = spread_columns(lognormal((rows, COLUMNS), generator(rows)), 3.0)
    weight[-1, 0] = 2 * weight.abs().max()
    return weight


def differences(gathered: torch.Tensor, recipe: str, weight: torch.Tensor) -> list[str]:
    """Names of the parts that differ from ``quantize`` of the full weight and from the oracle.

    And scales that lie where cuBLASLt does not read them: there is no GPU here to refuse one.
    """
    assert isinstance(gathered, f8sub.Float8Tensor), type(gathered)
    scale_inv = gathered.rowwise.scale_inv
    assert tuple(gathered.shape) == tuple(weight.shape)
    both = gathered.detach()
    # Rows that do not fill bytes have no columns: no layer that is converted has such a weight.
    columns = weight.shape[0] % both.rowwise.format.codes_per_byte == 0
    if columns:
        both.update_usage(columnwise=True)
    quantized = f8sub.quantize(weight, recipe, operand="w", columnwise=columns)
    expected = dict(zip(("rowwise", "columnwise"), oracle.operands(recipe, "w", weight), strict=True))
    found = ["scales at no multiple of 16 bytes"] * (scale_inv.storage_offset() * scale_inv.itemsize % 16 > 0)
    for name in ("rowwise", "columnwise") if columns else ("rowwise",):
        # Clones: FSDP2 cannot free a storage that numpy once looked at.
        operand, right = (getattr(tensor, name) for tensor in (both.clone(), quantized))
        alike = (torch.equal(bits(a), bits(b)) for a, b in zip(operand.tensors, right.tensors, strict=True))
        found += [] if all(alike) else [f"{name}: not quantize's"]
        found += [f"{name}: not the oracle's {part}" for part in expected[name].differences(operand)]
    return found


def with_weight(recipe: str, rows: int) -> nn.Module:
    model = Stack(COLUMNS, rows)
    with torch.no_grad():
        model.layers[0].weight.copy_(full_weight(rows))
    return f8sub.convert_to_float8(model, recipe=recipe)


def products(model: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """y and dx, which read the rowwise and the columnwise weight."""
    rows = model.layers[0].out_features
    x = gaussian((16, COLUMNS), generator(1)).to(dtype).requires_grad_()
    y = model(x)
    y.backward(gaussian((16, rows), generator(2)).to(dtype))
    return y.detach(), x.grad


DTYPES = {"fp32": (MixedPrecisionPolicy(), torch.float32), "bf16": (BF16, torch.bfloat16)}


@on_each_recipe_and_world
def test_any_number_of_rows(rank, world, recipe):
    selection.MULTIPLE = 1
    found = {}
    for rows in ROWS:
        for name, (policy, dtype) in DTYPES.items():
            model = fully_shard(with_weight(recipe, rows), mp_policy=policy)
            weight = full_weight(rows).to(dtype)
            wrong = []
            if rows % MULTIPLE == 0:
                f8sub.precompute_scales(model)
                expected = products(with_weight(recipe, rows).to(dtype), dtype)
                wrong += [] if equal(products(model, dtype), expected) else ["y or dx"]
            for precompute in (True, False):
                if precompute:
                    f8sub.precompute_scales(model)
                model.unshard()
                wrong += differences(model.layers[0].weight, recipe, weight)
                model.reshard()
            found[f"{rows} rows of {name}"] = wrong
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert len(found) == 2 * len(ROWS)


@pytest.mark.parametrize("world", [3])
@on_each_recipe
def test_rows_past_a_short_shard_are_zero(rank, world, recipe):
    """Of five rows on three ranks the last has one: what it sends does not depend on what lay in its memory."""
    selection.MULTIPLE = 1
    model = with_weight(recipe, 5)
    fully_shard(model)
    f8sub.precompute_scales(model)
    rows, copy_in, sent = len(model.layers[0].weight.to_local()), shards._copy_in, []

    def recorded(inputs, gathered, *sizes) -> tuple[torch.Tensor, torch.Tensor]:
        gathered.fill_(0xAB)
        own, gathered = copy_in(inputs, gathered, *sizes)
        sent.append(own[: inputs[0].numel()].view(len(inputs[0]), -1).clone())
        return own, gathered

    with mock.patch.object(shards, "_copy_in", recorded):
        model.unshard()
    past = sent[0][rows:]
    assert len(past) == (rank == 2)
    assert not past.any()


def laid_out(layout: str, model: nn.Module) -> nn.Module:
    if layout == "columns":
        return fully_shard(model, shard_placement_fn=lambda parameter: Shard(1))
    return fully_shard(model, mesh=replicated(int(layout.split()[0])))


def gathered(recipe: str, layout: str) -> list[str]:
    """What differs at first, and after each rank changed its shard without saying so."""
    model, found = laid_out(layout, with_weight(recipe, 80)), []
    f8sub.precompute_scales(model)
    for factor in (1.0, 3.0):
        with torch.no_grad():
            model.layers[0].weight.to_local().mul_(factor)
        model.unshard()
        found += differences(model.layers[0].weight, recipe, factor * full_weight(80))
        dist.barrier()
        model.reshard()
    return found


@pytest.mark.parametrize(("recipe", "layout", "world"), long_but(LAID_OUT[:4], LAID_OUT))
def test_shards_of_columns_and_of_replicas(rank, world, recipe, layout):
    if layout == "columns" and f8sub.get_recipe(recipe).fprop.b.codes_per_byte > 1:
        with pytest.raises(f8sub.Float8ConfigError, match=r"^layers\.0.*shard it by rows"):
            gathered(recipe, layout)
    else:
        assert gathered(recipe, layout) == []


@pytest.mark.parametrize("policy", [BF16, None], ids=["bf16", "none"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_under_autocast_a_bf16_policy_makes_both_all_gathers_one(rank, world, recipe, policy):
    """Without a policy codes are cast from float32 here and from bf16 there; docs/numerics.md says how far apart."""
    results = []
    for all_gather in (True, False):
        model = seed_weights(Stack(64, 96, 64))
        shard(f8sub.convert_to_float8(model, recipe=recipe, float8_all_gather=all_gather), policy)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(model(gaussian((32, 64), generator(1))).double())
    error = (results[0] - results[1]).norm() / results[1].norm()
    assert (0 < error < (0.12 if recipe == "nvfp4" else 0.05)) if policy is None else error == 0
