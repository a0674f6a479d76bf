"""Below which size a linear layer gains nothing in float8: forward and backward beside bf16's, in eager code.

A layer by itself whose larger dimension is --width, as it is and transposed; and a layer beside another of --width that
reads the same x, where converting both is compared with converting the other alone. A GPU's times are those of CUDA
graphs, which leave the host out and cast the weights in every replay. Of a recipe without native GEMMs on the GPU
one layer is timed as it is launched: how slow the reference backend is. ``MIN_DIM`` of ``f8sub.convert.selection`` and
``REFERENCE_TIMES_BF16`` of ``f8sub.convert.messages`` come from here.

    python scripts/bench/small_layers.py

Without a CUDA device everything runs on the CPU, tiny, to show that it runs.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence

import torch
from torch import nn

import f8sub
from f8sub.kernels.gemm.select import REFERENCE, Plan
from scripts.bench.timing import SETS, by_graph, by_launches, in_turns
from scripts.table import Table, finish, parser

RECIPES = ["tensorwise", "rowwise", "blockwise", "gridquant"]
SIZES = [16, 64, 128, 256, 512, 1024, 2048]
Given = tuple[torch.Tensor, ...]
"""x, and a dy of each layer."""


class Siblings(nn.Module):
    """Layers that read one x."""

    def __init__(self, fan_in: int, fan_outs: Sequence[int], device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"bias": False, "dtype": torch.bfloat16, "device": device}
        self.layers = nn.ModuleList(nn.Linear(fan_in, fan_out, **options) for fan_out in fan_outs)

    def step(self, given: Given) -> None:
        """Forward and backward."""
        x, *dys = given
        torch.autograd.grad([layer(x) for layer in self.layers], [x, *self.parameters()], dys)


def speeds(
    recipes: Sequence[str],
    sizes: tuple[int, int, Sequence[int]],
    device: torch.device,
    skip: Sequence[str] = (),
) -> list[str]:
    """How many times as fast all layers in float8 are, by recipe.

    ``sizes`` are tokens, features in, and features out of each layer. They are compared with the layers of ``skip`` in
    bf16 and the others in float8; where it is empty, with all in bf16.
    """
    tokens, fan_in, fan_outs = sizes
    options = {"dtype": torch.bfloat16, "device": device}
    sets = [tuple(torch.randn(tokens, size, **options) for size in (fan_in, *fan_outs)) for _ in range(SETS)]
    for x, *_ in sets:
        x.requires_grad_()
    found = []
    for recipe in recipes:
        before, after = (Siblings(fan_in, fan_outs, device) for _ in range(2))
        if skip:
            f8sub.convert_to_float8(before, recipe, skip=skip, skip_defaults=False)
        layers = f8sub.convert_to_float8(after, recipe, skip_defaults=False).layers
        graphs = device.type == "cuda" and REFERENCE not in layers[0]._f8sub.plan.gemms.values()
        timers = {
            name: by_graph(model.step, sets, None) if graphs else by_launches(model.step, sets, device)
            for name, model in (("before", before), ("after", after))
        }
        times = in_turns(timers, 15 if graphs else 3)
        found.append(f"{statistics.median(times['before']) / statistics.median(times['after']):.3f}")
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=8192)
    options.add_argument("--width", type=int, default=4096)
    arguments = options.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens, width, sizes = arguments.tokens, arguments.width, SIZES
    if device.type == "cpu":
        tokens, width, sizes = 32, 64, [16]
    where = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU, tiny: figures of no kernel"
    rows = []
    for size in sizes:
        rows.append([f"{width} to {size}", *speeds(RECIPES, (tokens, width, [size]), device)])
        rows.append([f"{size} to {width}", *speeds(RECIPES, (tokens, size, [width]), device)])
        beside = speeds(RECIPES, (tokens, width, [width, size]), device, skip=("layers.1",))
        rows.append([f"{width} to {size}, beside {width} to {width}", *beside])
    Table(f"times as fast in float8, {tokens} tokens, {where}", ["layer", *RECIPES], rows).show()
    plans = {name: Plan.make(f8sub.get_recipe(name), device) for name in f8sub.recipe_names()}
    slow = [name for name, plan in plans.items() if REFERENCE in plan.gemms.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", f8sub.Float8Warning)
        row = [f"{width} to {width}", *speeds(slow, (tokens, width, [width]), device)]
    table = Table("times as fast, by the reference backend", ["layer", *slow], [row])
    finish(arguments, {"recipes": RECIPES, "times": rows, "slow": slow, "slow_times": row}, table)


if __name__ == "__main__":
    main()
