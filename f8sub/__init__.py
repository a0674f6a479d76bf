"""Float8 training for PyTorch, made for FSDP2.

model = f8sub.convert_to_float8(model)      # before fully_shard
...
optimizer.step()
f8sub.precompute_scales(model)              # after every step
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from f8sub import optim as optim
from f8sub import tensor_parallel as tensor_parallel
from f8sub.attention.kernel_order import prefer_cudnn_attention
from f8sub.checkpoint.load import load_float8
from f8sub.checkpoint.save import save_float8
from f8sub.checkpoint.stream import float8_state_dict, float8_weights
from f8sub.convert.attention import attend_in_float8
from f8sub.convert.convert import convert_from_float8, convert_to_float8
from f8sub.convert.messages import no_attribute as _no_attribute
from f8sub.convert.primary_weights import drop_high_precision, restore_high_precision
from f8sub.convert.swiglu_input import keep_swiglu_input_in_float8
from f8sub.diagnostics.compare import compare
from f8sub.diagnostics.comparison import Comparison
from f8sub.diagnostics.find_nonfinite import find_nonfinite
from f8sub.diagnostics.monitor import Monitor
from f8sub.diagnostics.report import ConversionReport, LayerReport, conversion_report
from f8sub.diagnostics.sensitivity import sensitivity
from f8sub.diagnostics.step_guard import skip_step_if_nonfinite
from f8sub.errors import (
    Float8ConfigError,
    Float8NumericsError,
    Float8RankMismatchError,
    Float8ShapeError,
    Float8Warning,
)
from f8sub.estimator.estimate import estimate, estimate_step
from f8sub.estimator.results import Estimate, StepEstimate
from f8sub.experts.grouped_linear import grouped_linear, grouped_swiglu
from f8sub.experts.seams import register_experts
from f8sub.experts.token_dispatch import dispatch_tokens_in_float8, exchange_tokens
from f8sub.formats import ALL, Float8Format, Operand, Rounding, ScaleRule, Tile
from f8sub.gradients.reduce_gradients import GradientReduction, reduce_gradients_in_float8
from f8sub.graphs.graph_step import GraphedStep, graph_step
from f8sub.linear.autocast import autocast
from f8sub.linear.checkpointing import checkpoint_policy
from f8sub.linear.float8_linear import Float8Linear
from f8sub.recipe import GemmSpec, Recipe, get_recipe, recipe_names
from f8sub.tensor import aten_ops as _aten_ops  # noqa: F401  (enters its operators in Float8Tensor's table)
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.tensor.quantize import quantize
from f8sub.version import __version__ as __version__
from f8sub.weights.precompute_scales import precompute_scales, register_precompute_hook

__all__ = [
    "ALL",
    "Comparison",
    "ConversionReport",
    "Estimate",
    "Float8ConfigError",
    "Float8Format",
    "Float8Linear",
    "Float8NumericsError",
    "Float8RankMismatchError",
    "Float8ShapeError",
    "Float8Tensor",
    "Float8Warning",
    "GemmSpec",
    "GradientReduction",
    "GraphedStep",
    "LayerReport",
    "Monitor",
    "Operand",
    "Recipe",
    "Rounding",
    "ScaleRule",
    "StepEstimate",
    "Tile",
    "attend_in_float8",
    "autocast",
    "checkpoint_policy",
    "compare",
    "conversion_report",
    "convert_from_float8",
    "convert_to_float8",
    "dispatch_tokens_in_float8",
    "drop_high_precision",
    "estimate",
    "estimate_step",
    "exchange_tokens",
    "find_nonfinite",
    "float8_state_dict",
    "float8_weights",
    "get_recipe",
    "graph_step",
    "grouped_linear",
    "grouped_swiglu",
    "keep_swiglu_input_in_float8",
    "load_float8",
    "precompute_scales",
    "prefer_cudnn_attention",
    "quantize",
    "recipe_names",
    "reduce_gradients_in_float8",
    "register_experts",
    "register_precompute_hook",
    "restore_high_precision",
    "save_float8",
    "sensitivity",
    "skip_step_if_nonfinite",
]


def __dir__() -> list[str]:
    """Return the public names; the folders that hold them are not public."""
    return sorted(
        [
            *__all__,
            *(name for name in globals() if name.startswith("__")),
            *("integrations", "optim", "tensor_parallel"),
        ]
    )


if not _TYPE_CHECKING:  # a type checker would take every name for one that there is

    def __getattr__(name: str) -> _Any:
        """Return ``f8sub.integrations``, which a model may never need; raise the error of any other name."""
        if name == "integrations":
            return _importlib.import_module("f8sub.integrations")
        raise _no_attribute(name, __dir__())
