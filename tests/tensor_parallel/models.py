"""What the tests of tensor parallelism cut into parts, and how far their results are from the whole model's."""

import copy
import re

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import f8sub
from f8sub.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput
from tests.data_sets import generator, lognormal, spread_columns

WIDTH, HIDDEN, BATCH, TOKENS = 64, 512, 2, 12


class MLP(nn.Module):
    """One layer that is cut by rows, one by columns; the bias of each the other way."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class FeedForward(nn.Module):
    """Two layers that share an x."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN)
        self.w2 = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.w1(x).relu() * self.w3(x))


class Block(nn.Sequential):
    """A module around another; torch.compile traces no forward of torch's own modules that have FSDP2's hooks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x)


OF_TOKENS = Shard(1)
ONE_GATHER = {
    "": PrepareFloat8ModuleInput(
        input_layouts=OF_TOKENS, desired_input_layouts=Replicate(), fwd_config_submodule_fqn="w3"
    ),
    "w1": Float8ColwiseParallel(),
    "w3": Float8ColwiseParallel(),
    "w2": Float8RowwiseParallel(output_layouts=OF_TOKENS),
}
PLANS = {
    "one gather a layer": {
        "0.w1": Float8ColwiseParallel(input_layouts=OF_TOKENS),
        "0.w3": Float8ColwiseParallel(input_layouts=OF_TOKENS),
        "0.w2": Float8RowwiseParallel(output_layouts=OF_TOKENS),
    },
    "one gather": {f"0.{name}".removesuffix("."): style for name, style in ONE_GATHER.items()},
    "high precision": {
        "0.w1": ColwiseParallel(input_layouts=OF_TOKENS),
        "0.w3": ColwiseParallel(input_layouts=OF_TOKENS),
        "0.w2": RowwiseParallel(output_layouts=OF_TOKENS),
    },
    "whole tokens": {
        "0.w1": Float8ColwiseParallel(),
        "0.w3": Float8ColwiseParallel(),
        "0.w2": Float8RowwiseParallel(),
    },
}
"""For a FeedForward that is the first module of a Sequential."""


CUT_BY_COLUMNS = ("down", "w2")
"""The layers that ranks have columns of; they have rows of the others."""
DEGREE = 4
"""The largest number of parts."""


def filled(model: nn.Module, recipe: str | None = None, **options: object) -> nn.Module:
    """Weights whose columns are of very different sizes, converted where a recipe is given.

    The parts of a weight differ in signs alone, so that all have the same amaxes.
    """
    rng = generator(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = spread_columns(lognormal(tuple(parameter.shape), rng), 2.0) / 40
            if name.endswith("weight"):
                dim = int(name.split(".")[-2] in CUT_BY_COLUMNS)
                magnitudes = torch.cat([values.chunk(DEGREE, dim)[0].abs()] * DEGREE, dim)
                values = magnitudes.copysign(values)
            parameter.copy_(values)
    return model if recipe is None else f8sub.convert_to_float8(model, recipe=recipe, **options)


class Parts(nn.Module):
    """What ranks compute of an MLP or a FeedForward, one after the other: each its part of the hidden features."""

    def __init__(self, whole: nn.Module, degree: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(copy.deepcopy(whole) for _ in range(degree))
        for place, part in enumerate(self.parts):
            for name, layer in part.named_children():
                dim = int(name in CUT_BY_COLUMNS)
                layer.weight = nn.Parameter(layer.weight.detach().chunk(degree, dim)[place].clone())
                if layer.bias is not None and dim == 0:
                    layer.bias = nn.Parameter(layer.bias.detach().chunk(degree)[place].clone())
                elif layer.bias is not None and place:
                    layer.bias.data.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(part(x) for part in self.parts)


def whole_gradients(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``products_of`` a model with ``Parts``, as of the model that has none."""
    joined = {name: value for name, value in found.items() if ".parts." not in f".{name}"}
    for name in found:
        before, cut, after = f".{name}".partition(".parts.0.")
        if not cut:
            continue
        parts = [
            value
            for other, value in found.items()
            if re.fullmatch(rf"{before}.parts.\d.{after}", f".{other}")
        ]
        layer, kind = after.split(".")
        by_columns = layer in CUT_BY_COLUMNS
        whole = parts[0] if by_columns and kind == "bias" else torch.cat(parts, int(by_columns))
        joined[f"{before}.{after}".strip(".")] = whole
    return joined


def feed_forward(recipe: str | None, **options: object) -> nn.Module:
    return filled(Block(FeedForward()), recipe, **options)


def mesh_of(*shape: int) -> DeviceMesh:
    """The last dimension is tensor parallelism's, the one before it fully_shard's, the first one its replicas'."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "dp", "tp")[-len(shape) :])


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    shape = (BATCH, TOKENS, WIDTH)
    return lognormal(shape, generator(6)), lognormal(shape, generator(7))


def products_of(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """y, dx and, by their names, the whole gradients of the parameters."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(dy)
    found = {"y": y.detach() + 0, "dx": x.grad}  # y is on its way still
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found
