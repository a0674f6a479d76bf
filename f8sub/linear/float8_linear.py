"""Float8Linear: ``y = x @ w.t() + bias`` with each of the three GEMMs run as the recipe says.

[Note: from x, w and dy to y, dx and dw]

x  --quantize--> rowwise, columnwise       saved for backward: columnwise only, 1 byte an element; see saved_input
w  --quantize--> rowwise                   saved for backward: nothing; columnwise is derived there and freed
dy --quantize--> rowwise, columnwise

- A plan (``kernels/gemm/select.py``) is the recipe and the backend of each GEMM.
- Sources (``kernels/scales.py``) say how the scales of x, w and dy are made in one call: from the current amax, or from
  what a feature made before. Forward makes them, and backward uses them too.
- ``kernels/quantize.py`` picks the kernel that casts. ``saved_input.py`` decides what backward has of x.
- Features enter by ``sockets.py``: other scales, weights that are DTensors, other plans for a while, codes of an x that
  another layer cast.
"""

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from f8sub.delayed.layers import sources_of
from f8sub.errors import Float8ConfigError, Float8ShapeError, jit_error
from f8sub.formats import HIGH_PRECISION
from f8sub.kernels.gemm.select import Plan
from f8sub.kernels.scales import CURRENT_SOURCES
from f8sub.linear import plan_in_use
from f8sub.linear.dtensor import place
from f8sub.linear.matmul import Float8Matmul, fprop
from f8sub.linear.one_node import one_node
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import apply, autocast_dtype, is_dtensor
from f8sub.weights.conversion import Conversion
from f8sub.weights.master_weight import MasterWeight, reassigned
from f8sub.weights.weight import WeightRecord, casting, check_assigned, check_not_raw, exported, local_tensor


class Float8Linear(torch.nn.Linear):
    """``nn.Linear`` whose three GEMMs run in float8; made by ``convert_to_float8``, by class swap.

    x is float32, bfloat16 or float16, with any leading dims, and need not have the weight's dtype. y has x's dtype, or
    that of ``torch.autocast``. The bias is added in high precision.

    Attributes:
        plan: the recipe and the backend of each GEMM, where no context asks for another.
        fqn: the layer's name in the model that was converted, for errors and reports.
        converted: the conversion that the weight is of.
        float8_all_gather: whether FSDP2 gathers the weight as float8.
        keep_x: what is saved of x for wgrad, one of ``saved_input.KEEP_X``.
    """

    plan: Plan
    fqn: str
    converted: Conversion
    float8_all_gather: bool
    keep_x: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise Float8ConfigError(
            f"{type(self).__name__} is made by f8sub.convert_to_float8, of an nn.Linear in a model; build the model "
            "with nn.Linear and convert it, or one layer: f8sub.convert_to_float8(nn.Linear(in_features, out_features))"
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: D102
        x = input  # nn.Linear's name, which callers and sharding plans know it by
        if x.dtype not in HIGH_PRECISION:
            raise TypeError(
                f"{self.fqn}: a float8 linear layer takes an input of {', '.join(map(str, HIGH_PRECISION))}, got "
                f"{x.dtype} of shape {tuple(x.shape)}; convert it with .to(torch.bfloat16)"
            )
        weight: torch.Tensor = self.weight
        # Not in_features: a rank may have a part of the weight, as a plain tensor, which reads a part of x.
        if x.dim() == 0 or x.size(-1) != weight.size(-1):
            raise Float8ShapeError(
                f"{self.fqn}: expected an input of shape (..., {weight.size(-1)}), got {tuple(x.shape)}; look at what "
                "calls the layer"
            )
        device = "cpu" if x.is_cpu else x.device.type
        dtype = autocast_dtype(device) or x.dtype
        if self.plan.device.type != device:
            self.follow(x.device)
        plan = plan_in_use.plan_in_use(self, weight) if plan_in_use.was_entered else self.plan
        sources = CURRENT_SOURCES if plan.recipe.scaling is None else sources_of(self, plan.recipe)
        bias: torch.Tensor | None = self.bias
        adds_bias = True
        whole: Callable[[torch.Tensor], torch.Tensor] | None = None
        if is_dtensor(weight):
            if torch.compiler.is_compiling() and Float8Tensor in map(type, map(local_tensor, (x, weight))):
                return one_node(self, plan, dtype, x, weight, bias)
            placed = place(self, plan, weight, x, bias, sources)
            x, weight, bias, adds_bias, sources, whole = placed
        y: torch.Tensor
        call = plan, dtype, sources
        if torch.is_grad_enabled():
            y = apply(Float8Matmul, x, weight, bias, call, self.keep_x, adds_bias)
        else:
            y, *_ = fprop(x, weight, bias if adds_bias else None, call, None)
        if plan_in_use.was_entered:
            plan_in_use.remember(self, plan, y)
        return y if whole is None else whole(y)

    def follow(self, device: torch.device) -> None:
        """Select backends anew where the layer came to a device of another type since it was converted.

        Raises:
            Float8ConfigError: the backend asked for does not run there; or ``torch.compile`` traces a first call there.
        """
        if self.plan.device.type == device.type:
            return
        refuse_compiling(self.fqn, self.plan.device, device)
        self.plan = Plan.make(self.plan.recipe, device, self.plan.backend)
        for guest in self.converted.layer_guests:
            guest.planned(self.converted, [self.plan])

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Float8Linear":
        super()._apply(casting(self.fqn, fn), recurse)  # type: ignore[no-untyped-call]
        if not self.weight.is_meta:
            self.follow(self.weight.device)
        return self

    def enter_weight(self) -> WeightRecord:
        """Enter the weight among those that were converted together."""
        recipe = self.plan.recipe
        format = recipe.fprop.b or recipe.dgrad.b or recipe.wgrad.b
        return self.converted.add(self, "weight", self.fqn, format, self.float8_all_gather)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        record, local = self.enter_weight(), local_tensor(self.weight)
        if isinstance(local, MasterWeight):
            local.cell.take(record)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.converted.settle()
        self.converted.keep_memory(self)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars and "weight" in self._parameters:  # else parametrized, or pruned
            destination[f"{prefix}weight"] = exported(self.weight)

    @override
    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if name == "weight":
            check_assigned(self.fqn, name, param)
        super().register_parameter(name, param)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        check_not_raw(self.fqn, {name: state_dict.get(prefix + name) for name in self._parameters})
        weight = self.weight
        kind = type(local_tensor(weight))
        self.converted.settle()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.converted.loaded()
        for guest in self.converted.layer_guests:
            guest.loaded(self, state_dict, prefix)
        if "weight" in self._parameters:
            reassigned(self.converted.record_of(self, "weight"), weight, kind)

    @property
    def how(self) -> str:
        """Recipe and backend, and what deviates from the defaults."""
        words = [self.plan.recipe.name, self.plan.described]
        if not self.float8_all_gather:
            words.append("gathered in high precision")
        deviations = (guest.deviation(self) for guest in self.converted.layer_guests)
        return ", ".join([*words, *filter(None, deviations)])

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        # What torch calls in place of ``forward`` while ``torch.jit.trace`` records.
        raise jit_error(self.fqn, "traced")

    def __prepare_scriptable__(self) -> Any:
        # What ``torch.jit.script`` asks each module for.
        raise jit_error(self.fqn, "scripted")

    def extra_repr(self) -> str:
        """nn.Linear's, and ``how``."""
        return f"{super().extra_repr()}, {self.how}"


def refuse_compiling(fqn: str, device: torch.device, new: torch.device) -> None:
    """Raise a Float8ConfigError where ``torch.compile`` traces the first call on a device of another type."""
    if torch.compiler.is_compiling():
        raise Float8ConfigError(
            f"{fqn}: converted for {device.type}, and compiled for {new.type}; move the model with model.to(device), "
            "or call it once before it is compiled"
        )
