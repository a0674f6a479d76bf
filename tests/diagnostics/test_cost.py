"""A sample costs less than the step that it is taken in: so of 100 steps it is at most 1 %.

Counted on meta tensors of the size of a Llama 3 8B's layers, with the figures of an H200 that ``f8sub.estimate`` has.
"""

import math
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import f8sub
from f8sub import Operand
from f8sub.diagnostics import statistics
from f8sub.diagnostics.statistics import (
    MAXIMA,
    SUMS,
    WIDTH,
    add_measured,
    measure,
)
from f8sub.estimator.estimate import shapes_of
from f8sub.estimator.gpus import H200
from f8sub.estimator.seconds import Run, block_seconds
from f8sub.kernels.triton import support
from f8sub.kernels.triton.launch import Launch
from tests.data_sets import gaussian, generator

TOKENS = 8192
LAUNCH = 5e-6
"""Seconds that Python and the driver take for a kernel of eager code, if the GPU waits for every one of them.

Source: docs/measurements, host times of eager steps over their kernels.
"""

MOST_LAUNCHES = 5
"""An empty tensor for what rows have is among them, which a GPU does not see."""

_VIEWS = ("view", "slice", "expand", "select", "detach", "alias", "unsqueeze", "t.", "transpose", "narrow")


class Moved(TorchDispatchMode):
    """Launches, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not str(func).removeprefix("aten.").startswith(_VIEWS):
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, out))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.launches += 1
            self.bytes += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return out

    @property
    def seconds(self) -> float:
        """Of an H200."""
        return self.bytes / H200.copy + self.launches * LAUNCH


def block_of_llama() -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=1,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def operand_on_meta(shape: tuple[int, int], format: f8sub.Float8Format) -> Operand:
    def empty(size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    return Operand(empty(shape, format.dtype), empty(format.tile.scale_shape(shape), torch.float32), format)


def moved_by(shape: tuple[int, int], format: f8sub.Float8Format) -> Moved:
    """By a measurement on a GPU into a row of a table; its kernels read what is looked at, codes and values."""
    values, operand = torch.empty(shape, dtype=torch.bfloat16, device="meta"), operand_on_meta(shape, format)
    sums, maxima = (torch.empty(size, dtype=torch.float32, device="meta") for size in (WIDTH, len(MAXIMA)))
    with (
        mock.patch.object(support, "takes", return_value=True),
        mock.patch.object(support, "device_of", nullcontext),
        mock.patch.object(Launch, "run") as run,
        Moved() as moved,
    ):
        add_measured(values, operand, sums, maxima)
    moved.launches += run.call_count
    moved.bytes += 3 * min(math.prod(shape), statistics.LOOKED_AT)
    return moved


def seconds_of_sample(shape: tuple[int, int], format: f8sub.Float8Format, cast: bool) -> float:
    """Of one operand: its cast, 5 bytes an element and two kernels at most, and what is measured."""
    moved = moved_by(shape, format)
    of_cast = 5 * math.prod(shape) / (0.78 * H200.copy) + 2 * LAUNCH
    return moved.seconds + of_cast * cast


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_sample_costs_at_most_a_step(recipe):
    """Of a compiled block, whose sample runs eagerly besides."""
    made, sample = f8sub.get_recipe(recipe), 0.0
    (products,) = shapes_of(block_of_llama()).blocks.values()
    for n, k in ((product.rows, product.cols) for product in products):
        operands = [
            ((TOKENS, k), made.fprop.a, True),
            ((TOKENS, n), made.dgrad.a, True),
            ((n, k), made.fprop.b, False),
        ]
        sample += sum(seconds_of_sample(*operand) for operand in operands)
    compiled, eager = (
        block_seconds(products, made, H200, Run(tokens=TOKENS, compiled=each)).total for each in (True, False)
    )
    added = sample + eager - compiled
    assert added / 100 <= 0.01 * compiled, f"{1e3 * added:.2f} ms a sample, {1e3 * compiled:.2f} ms a step"


def test_what_is_looked_at_of_a_large_matrix_does_not_grow():
    format = f8sub.get_recipe("rowwise").fprop.a
    counts = []
    for rows in (8192, 16384):
        moved = moved_by((rows, 4096), format)
        counts.append((moved.launches, moved.bytes))
    (launches, small), (again, large) = counts
    assert launches == again == MOST_LAUNCHES
    assert large - small < 4 * 8192 * 4096  # the amax, and what scales of rows take


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "gridquant", "mxfp8"])
@pytest.mark.parametrize("role", ["x", "w", "dy"])
def test_launches_of_an_operand(recipe, role):
    """Its amax, its scales where it has several, and two kernels; plain PyTorch takes some 50."""
    format = f8sub.get_recipe(recipe).formats(role)[0]
    assert moved_by((8192, 4096), format).launches <= MOST_LAUNCHES


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "gridquant", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("role", ["x", "w", "dy"])
def test_rows_that_are_looked_at_are_measured_as_a_matrix_of_them_with_the_scales_of_all(recipe, role):
    values = gaussian((512, 256), generator(0)) * torch.logspace(-2, 2, 512)[:, None]
    operand = f8sub.quantize(values, recipe, role, columnwise=False).rowwise
    whole = measure(values, operand)
    with mock.patch.object(statistics, "LOOKED_AT", 512 * 256 // 4):
        found = measure(values, operand)
    assert torch.equal(found.maxima, whole.maxima)
    codes = f8sub.Float8Tensor(operand, None, torch.float32).dequantize()
    error = (codes - values)[::4].square().sum()
    sums = dict(zip(SUMS, found.sums.tolist(), strict=False))
    assert sums["count"] == 128 * 256
    assert sums["noise"] == pytest.approx(error.item(), rel=1e-4)
    assert sums["signal"] == pytest.approx(values[::4].square().sum().item(), rel=1e-4)
