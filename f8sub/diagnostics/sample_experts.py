"""The operands and results of experts' products, in the step that a monitor samples.

Tokens are cast by expert, as the product casts them, and a row of them is told as of any layer. Weights are told
expert by expert, so that no rank makes float32 values of all of them at once.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from typing_extensions import override

from f8sub.diagnostics.sample import (
    Probe,
    Sample,
    each_element,
    node_of,
    part_of,
    probes,
)
from f8sub.experts.adapters import name_in
from f8sub.experts.grouped_linear import GroupedCall, Product, rowwise_of_experts, watchers
from f8sub.experts.module import Float8Experts
from f8sub.formats import Float8Format, Operand, present
from f8sub.kernels.grouped.gemm import is_one_by_one, is_one_by_one_format
from f8sub.kernels.grouped.operands import Groups
from f8sub.kernels.grouped.quantize import cast_tokens, quantize_experts
from f8sub.kernels.quantize import quantize
from f8sub.kernels.scales import CURRENT, ScaleSource
from f8sub.recipe import Recipe
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import is_metadata_inference
from f8sub.weights.weight import Weight, master_of

Parts = Iterable[tuple[torch.Tensor, Operand]]


class ExpertsProbe(Probe):
    """A row for each weight of each module of experts, by the weight's full name."""

    @override
    def names(self, model: torch.nn.Module) -> list[str]:
        return [f"{fqn}.{name}" for fqn, module in _experts_of(model).items() for name in module.weights]

    @override
    def begin(self, sample: Sample) -> Callable[[], None]:
        watch = _Watch(sample, _experts_of(sample.model))
        watchers.append(watch)
        return lambda: watchers.remove(watch)


probes.append(ExpertsProbe())


def _experts_of(model: torch.nn.Module) -> dict[str, Float8Experts]:
    return {
        name.replace("_orig_mod.", ""): module
        for name, module in model.named_modules()
        if isinstance(module, Float8Experts)
    }


class _Watch:
    def __init__(self, sample: Sample, modules: dict[str, Float8Experts]) -> None:
        self.sample = sample
        self.names = {module: name for name, module in modules.items()}
        self._seen: set[Any] = set()

    def __call__(self, module: Any, product: Product) -> None:
        """Measure a product of a module of the model, the first one of its weight with a gradient."""
        call = product.call
        if module not in self.names or call is None or not product.y.requires_grad or is_metadata_inference():
            return
        attribute = name_in(module, product.weight)
        name = f"{self.names[module]}.{attribute}"
        if attribute is None or name in self._seen:
            return
        self._seen.add(name)
        recipe, groups = call.plan.recipe, product.groups
        with torch.no_grad():
            self._tokens(name, "x", product.x.to(call.dtype), groups, recipe.fprop.a, call.sources.x)
            self._tokens(name, "y", product.y, groups, recipe.fprop.a)
            if recipe.fprop.b is not None and self.sample.wants(name, "w"):
                parts = _weights(module, attribute, product.weight, call, recipe.fprop.b)
                self.sample.take(name, "w", recipe.fprop.b, parts)
        format = recipe.dgrad.a or recipe.wgrad.a
        # Hooks hold no product: it holds y, which holds them, where no garbage collector sees it.
        product.y.register_hook(functools.partial(self._note_dy, name, groups, call, format))
        if not (self.sample.wants(name, "dx") or self.sample.wants(name, "dw")):
            return
        if is_one_by_one(recipe):
            for index, node in enumerate(_nodes_of_experts(product.y)):
                node.register_hook(functools.partial(self._note_gradients_of_one, name, index, recipe))
        else:
            node = node_of(product.y, "GroupedMatmul")
            node.register_hook(functools.partial(self._note_gradients, name, groups, call))

    def _note_dy(
        self, name: str, groups: Groups, call: GroupedCall, format: Float8Format | None, dy: torch.Tensor
    ) -> None:
        with torch.no_grad():
            self._tokens(name, "dy", dy.contiguous(), groups, format, call.sources.dy)

    def _note_gradients(self, name: str, groups: Groups, call: GroupedCall, gradients: Any, _: Any) -> None:
        recipe, (dx, dw) = call.plan.recipe, gradients[:2]
        with torch.no_grad():
            if dx is not None:
                self._tokens(name, "dx", dx, groups, recipe.dgrad.a)
            format = recipe.fprop.b
            if (
                dw is None
                or format is None
                or not self.sample.wants(name, "dw")
                or self.sample.has(name, "dw")
            ):
                return
            values = dw.transpose(1, 2) if call.transposed else dw
            parts = ((each, quantize_experts(each[None], format).of_group(0)) for each in values)
            self.sample.take(name, "dw", format, parts)

    def _note_gradients_of_one(self, name: str, index: int, recipe: Recipe, gradients: Any, _: Any) -> None:
        """Dx and dw of one expert, the first time; they add to what others have in the row."""
        if (name, index) in self._seen:
            return
        self._seen.add((name, index))
        with torch.no_grad():
            for role, found, format in zip(
                ("dx", "dw"), gradients, (recipe.dgrad.a, recipe.fprop.b), strict=False
            ):
                if found is not None and format is not None and self.sample.wants(name, role):
                    self.sample.take(name, role, format, [_cast_alone(found, format)])

    def _tokens(
        self,
        name: str,
        role: str,
        values: torch.Tensor,
        groups: Groups,
        format: Float8Format | None,
        source: ScaleSource = CURRENT,
    ) -> None:
        """Take tokens, each expert's cast for itself; rows of no expert count as zeros."""
        if format is None or not self.sample.wants(name, role) or self.sample.has(name, role):
            return
        if is_one_by_one_format(format):
            parts = (_cast_alone(values[first:end], format) for first, end in groups.host_bounds)
            self.sample.take(name, role, format, parts)
            return
        made = cast_tokens(values, groups, format, None, 1, source.prior()).rowwise
        if made is None:
            raise RuntimeError("cast_tokens returned no rowwise operand for a rowwise format")
        codes, scale, is_none = made.by_row(groups)
        operand = Operand(codes, scale.expand(codes.shape).contiguous(), each_element(format))
        codes.view(torch.uint8).masked_fill_(is_none, 0)
        self.sample.take(name, role, format, [(values.masked_fill(is_none, 0), operand)])


def _cast_alone(values: torch.Tensor, format: Float8Format) -> tuple[torch.Tensor, Operand]:
    """One expert's part of an operand, and its codes."""
    return values, present(quantize(values.contiguous(), format, None).rowwise)


def _nodes_of_experts(y: torch.Tensor) -> list[torch.autograd.graph.Node]:
    """The nodes that make the experts' gradients where each is multiplied by itself."""
    following = [] if y.grad_fn is None else [node for node, _ in y.grad_fn.next_functions]
    return [node for node in following if node is not None and node.name().startswith("Float8Matmul")]


def _weights(
    module: Float8Experts, attribute: str, weight: torch.Tensor, call: GroupedCall, format: Float8Format
) -> Iterator[Any]:
    """Each expert's values and codes; of a weight that FSDP2 gathered in float8, those of this rank's shard."""
    if not isinstance(weight, Float8Tensor):
        master = master_of(weight) if isinstance(weight, Weight) else weight
        values = (master.plain if isinstance(master, Weight) else weight).to(call.dtype)
        values = values.transpose(1, 2) if call.transposed else values
        if is_one_by_one_format(format):
            yield from (_cast_alone(each, format) for each in values)
            return
        operands = rowwise_of_experts(weight, format, call)
        for index, each in enumerate(values):
            yield each, operands.of_group(index)
        return
    shard = module.converted.record_of(module, attribute).shard
    if shard is None or not shard.master.numel() or weight.rowwise is None or shard.layout.folded is not None:
        return
    values, rows = shard.values, weight.shape[1]
    row, col = (a - b for a, b in zip(shard.layout.offset, shard.layout.origin, strict=True))
    for first in range(0, len(values), rows):
        each = values[first : first + rows].to(shard.dtype).to(weight.device)
        yield each, part_of(weight.rowwise, row + first, col, *each.shape)
