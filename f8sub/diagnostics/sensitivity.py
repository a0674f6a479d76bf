"""Ranks layers by the harm of float8 per FLOP, in one forward and backward instead of one for each layer.

Everything runs in high precision, and each layer also makes the ``y8`` that float8 would have. To first order the loss
changes by the sum of ``(y8 - y) * dy``. Terms cancel there by chance, so the harm that is told is the root of the sum
of their squares.

A module of experts is one row, for it is skipped as a whole.
"""

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from f8sub.convert.products import products_of
from f8sub.diagnostics.compare import checked_loss
from f8sub.errors import Float8ConfigError, Float8NumericsError, refuse_other_than_a_module
from f8sub.experts.grouped_linear import Multiplied, multiply, watching
from f8sub.kernels.gemm.select import Plan
from f8sub.kernels.quantize import quantize
from f8sub.kernels.reference import dequantize
from f8sub.linear.float8_linear import Float8Linear, sources_of, weight_rowwise
from f8sub.torch_compat import autocast_dtype, is_dtensor
from f8sub.weights.weight import Weight, is_converted, master_of, weight_beside_forward


class LayerSensitivity(NamedTuple):
    """Holds the harm of float8 in one layer.

    Attributes:
        fqn: its name.
        harm: size of the change of the loss that its fprop in float8 makes, in units of the loss.
        flops: share of the FLOPs of all layers that were looked at, 0 to 1.
    """

    fqn: str
    harm: float
    flops: float


Note = Callable[[str, torch.Tensor, torch.Tensor, int], None]
"""Takes a name, what a product's result in float8 has more, the result in high precision, and the product's FLOPs."""


_ROUNDING = 1e-9
"""By how much the shares of all layers may be more than 1 in sum."""


@dataclass(frozen=True)
class Sensitivity:
    """Ranks layers, those to leave in high precision first on top. ``str()`` is a table.

    Attributes:
        layers: by harm for each FLOP, falling.
        loss: in high precision.
    """

    layers: tuple[LayerSensitivity, ...]
    loss: float

    def skip(self, flops: float = 0.05) -> list[str]:
        """Return names for ``convert_to_float8(skip=...)``: the first layers that have at most this share of FLOPs.

        Raises:
            Float8ConfigError: no share from 0 to 1.
        """
        if not isinstance(flops, int | float) or not 0 <= flops <= 1:
            raise Float8ConfigError(f"flops is a share from 0 to 1, 0.05 for 5 %, got {flops!r}")
        names, left = [], flops + _ROUNDING
        for layer in self.layers:
            if layer.flops <= left:
                names.append(layer.fqn)
                left -= layer.flops
        return names

    def __str__(self) -> str:
        width = max(len(layer.fqn) for layer in self.layers)
        lines = [f"{'layer':{width}}      harm   FLOPs  harm / FLOPs"]
        lines += [
            f"{layer.fqn:{width}}  {layer.harm:8.2e}  {layer.flops:6.2%}  {layer.harm / max(layer.flops, 1e-12):12.2e}"
            for layer in self.layers
        ]
        unit = f"harm: how far the layer's float8 moves the loss, which is {self.loss:.4f} in high precision"
        return "\n".join([*lines, unit, f"skip={self.skip()!r}  # at most 5% of these layers' FLOPs"])


def sensitivity(model: torch.nn.Module, loss_of: Callable[[torch.nn.Module], torch.Tensor]) -> Sensitivity:
    """Look at how much the float8 of each converted layer, or module of experts, changes the loss of one batch.

    Gradients of the parameters are left as they were. What dy's rounding does is not part of it: it does not show which
    layers are sensitive (``python scripts/tables/sensitivity.py``).

    Args:
        model: converted, not sharded; trained a little, because at first all layers are equally sensitive.
        loss_of: from the model to the loss of a batch, a tensor of one element. It runs once, with gradients.

    Raises:
        Float8ConfigError: no converted layer, a sharded one, one whose master was dropped, one that did not run, or no
            loss.
        Float8NumericsError: the loss, or the harm of a layer, is NaN or infinite.
    """
    refuse_other_than_a_module("sensitivity", model)
    modules = {fqn: m for fqn, m in model.named_modules() if is_converted(m)}
    weights = {fqn: [product.weight for product in products_of(m)] for fqn, m in modules.items()}
    if not weights:
        raise Float8ConfigError(
            "sensitivity found no float8 layer; call f8sub.convert_to_float8(model) first"
        )
    found: dict[str, tuple[torch.Tensor, int]] = {}
    note = functools.partial(_note, found)
    # Gradients that the user has are put back, after an error as well.
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    with ExitStack() as exits:
        for parameter, grad in kept:
            parameter.grad = None
            exits.callback(setattr, parameter, "grad", grad)
        for fqn, several in weights.items():
            for weight in several:
                _check(fqn, weight)
                # A frozen layer that nothing before it learns has no dy.
                exits.callback(weight.requires_grad_, weight.requires_grad)
                weight.requires_grad_(True)
        names = {module: (fqn, module._f8sub.plan) for fqn, module in modules.items()}
        for module, (fqn, plan) in names.items():
            exits.callback(setattr, module._f8sub, "plan", plan)
            # Experts are watched by product.
            if not plan.grouped:
                look = functools.partial(_after, note, fqn, plan)
                exits.callback(module.register_forward_hook(look, with_kwargs=True).remove)
            # y8 is computed beside a forward in high precision.
            high = plan.recipe.with_high_precision(fprop=True, dgrad=True, wgrad=True)
            module._f8sub.plan = plan.with_recipe(high)
        exits.enter_context(watching(functools.partial(_look, note, names)))
        exits.enter_context(torch.compiler.set_stance("force_eager"))
        loss = checked_loss(loss_of(model))
        if not bool(loss.isfinite()):
            raise Float8NumericsError(
                f"the loss is {loss.item()}, which ranks no layers; f8sub.find_nonfinite shows where it begins"
            )
        loss.backward()
    if missing := sorted(weights.keys() - found.keys()):
        raise Float8ConfigError(
            f"{', '.join(missing)}: not run by loss_of, or its output takes no part in the loss; leave such layers out "
            "of the conversion"
        )
    total = sum(flops for _, flops in found.values()) or 1
    rows = [LayerSensitivity(fqn, harm.sqrt().item(), flops / total) for fqn, (harm, flops) in found.items()]
    if broken := [row.fqn for row in rows if not math.isfinite(row.harm)]:
        raise Float8NumericsError(
            f"{', '.join(broken)}: float8's error, or the gradient that it is multiplied by, is NaN or infinite, so "
            "layers cannot be ranked; f8sub.find_nonfinite shows where it begins"
        )
    # Harm per FLOP: layers that lose most for what they gain are first.
    return Sensitivity(tuple(sorted(rows, key=lambda row: -row.harm / max(row.flops, 1e-12))), loss.item())


def _check(fqn: str, weight: torch.Tensor) -> None:
    if is_dtensor(weight):
        raise Float8ConfigError(f"{fqn}: its weight is sharded; call sensitivity before fully_shard")
    if isinstance(weight, Weight) and master_of(weight) is None:
        raise Float8ConfigError(
            f"{fqn}: its high-precision values were dropped, so nothing shows what float8 lost"
        )


def _after(
    note: Note, fqn: str, plan: Plan, layer: Float8Linear, args: Any, kwargs: dict[str, Any], y: torch.Tensor
) -> None:
    x: torch.Tensor = args[0] if args else kwargs["input"]
    recipe, dtype = plan.recipe, autocast_dtype(x.device.type) or x.dtype
    with torch.no_grad():
        matrix = x.detach().reshape(-1, x.shape[-1]).to(dtype)
        read = weight_beside_forward(layer)
        master = master_of(read)
        weight = (read.detach() if master is None else master.plain).to(dtype)
        sources = sources_of(layer, recipe)
        x8 = quantize(matrix, recipe.fprop.a, None, sources.x).rowwise
        w8 = weight_rowwise(read, (plan, dtype, sources))
        a = matrix.float() if x8 is None else dequantize(x8, torch.float32)
        b = weight.float() if isinstance(w8, torch.Tensor) else dequantize(w8, torch.float32)
        # [M, N] in float32: the difference of two products that are nearly equal.
        error = (a @ b.t() - matrix.float() @ weight.float().t()).view(y.shape)
    note(fqn, error, y, matrix.shape[0] * weight.numel())


def _note(
    found: dict[str, tuple[torch.Tensor, int]], fqn: str, error: torch.Tensor, y: torch.Tensor, flops: int
) -> None:
    def add(dy: torch.Tensor) -> None:
        harm, before = (error * dy.float()).square().sum(), found.get(fqn)
        # A layer that runs several times adds up.
        found[fqn] = (harm, flops) if before is None else (before[0] + harm, before[1] + flops)

    if y.requires_grad:
        y.register_hook(add)


def _look(
    note: Note, names: Mapping[torch.nn.Module, tuple[str, Plan]], module: Any, product: Multiplied
) -> None:
    x, weight, groups, call, y = product
    if module not in names or call is None:
        return
    fqn, plan = names[module]
    with torch.no_grad():
        y8 = multiply(x.detach(), weight, groups, call._replace(plan=plan))
        error = y8.float() - y.detach().float()
    # Tokens of all experts, each times N * K.
    note(fqn, error, y, int(groups.ends[-1]) * weight[0].numel())
