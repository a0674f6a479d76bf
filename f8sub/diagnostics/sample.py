"""Sample: the hooks of one step that a monitor measures, and the table that they fill.

Of experts: Tokens are cast by expert, as the product casts them, and a row of them is told as of any layer. Weights are
told expert by expert, so that no rank makes float32 values of all of them at once.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from f8sub.capture import launching
from f8sub.diagnostics.statistics import MAXIMA, WIDTH, Statistics, add_measured, statistics_of
from f8sub.experts.grouped_linear import GroupedCall, Multiplied, name_of_read, rowwise_of_experts, watching
from f8sub.formats import ALL, Float8Format, Operand, Rounding, Tile, present
from f8sub.host_copy import sent_to
from f8sub.kernels import reference
from f8sub.kernels.grouped.gemm import is_one_by_one, is_one_by_one_format
from f8sub.kernels.grouped.operands import Groups
from f8sub.kernels.quantize import quantize, quantize_experts
from f8sub.kernels.scales import CURRENT, LayerSource, ScaleSource
from f8sub.linear.converted import ConvertedModule, plan_of
from f8sub.linear.dtensor import place
from f8sub.linear.float8_linear import Float8Linear, sources_of, weight_rowwise
from f8sub.linear.shared_input import Call
from f8sub.recipe import Recipe
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import autocast_dtype, is_dtensor, is_metadata_inference
from f8sub.weights.weight import Weight, master_of, own_parameter, weight_beside_forward

ROLES = ("x", "w", "dy")
"""What a layer casts."""

RESULTS = ("y", "dx", "dw")
"""What its GEMMs return. They are cast with current scales for the statistics alone: y as x, dx as dy, dw as w."""


class _Noted(NamedTuple):
    """Remembers an x, how it was cast, and the number of its row."""

    x: "weakref.ref[torch.Tensor]"
    version: int
    format: Float8Format
    dtype: torch.dtype
    source: LayerSource
    row: int

    def is_like(self, other: "_Noted") -> bool:
        """Return whether both are one x, cast the same; stochastic rounding draws other numbers for each layer."""
        same = self.x() is other.x() and self.source is other.source
        return same and self[1:4] == other[1:4] and self.format.rounding is not Rounding.STOCHASTIC


class Sample:
    """Holds the hooks of one step, and the table that they fill."""

    def __init__(
        self, step: int, modules: dict[str, ConvertedModule], rows: dict[tuple[str, str], int]
    ) -> None:
        self.step, self._rows = step, rows
        self._formats: dict[tuple[str, str], Float8Format] = {}
        weights = [own_parameter(m, name) for m in modules.values() for name in m._f8sub.weights]
        # Where the layers run: CPU offload keeps shards elsewhere. Without any the table is empty.
        first = weights[0] if weights else torch.empty(0, dtype=torch.float32, device="cpu")
        device = first.device_mesh.device_type if is_dtensor(first) else first.device
        # One row for each (layer, role): zeros, and -inf, where nothing is taken.
        self._sums = torch.zeros(len(rows), WIDTH, dtype=torch.float32, device=device)
        self._maxima = torch.full((len(rows), len(MAXIMA)), -torch.inf, dtype=torch.float32, device=device)
        self._exits = contextlib.ExitStack()
        for name, layer in modules.items():
            # Experts are watched by product, below.
            if layer._f8sub.plan.grouped:
                continue
            before = layer.register_forward_pre_hook(functools.partial(self._before, name), with_kwargs=True)
            # Before other hooks, which may put something else in the place of y.
            after = layer.register_forward_hook(functools.partial(self._after, name), prepend=True)
            self._exits.callback(before.remove)
            self._exits.callback(after.remove)
        self._exits.enter_context(watching(_Watch(self, modules)))
        # Hooks see tensors in eager code alone.
        self._exits.enter_context(torch.compiler.set_stance("force_eager"))
        self._exits.enter_context(launching("a Monitor samples it"))
        self._called = False
        self._calls: dict[str, Call] = {}
        self._seen: set[str] = set()  # backward meets the last of several forwards first
        self._last_x: _Noted | None = None
        self._same: dict[int, int] = {}

    @property
    def saw_nothing(self) -> bool:
        """True if no layer was called, not even under ``no_grad``."""
        return not (self._called or self._formats)

    def close(self) -> None:
        """Remove the hooks."""
        self._exits.close()

    def reduced(self, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Return the table of all ranks together: float32, (rows, ``WIDTH`` + ``len(MAXIMA)``)."""
        if self._same:
            rows, like = (
                sent_to(self._sums.device, list(each)) for each in (self._same, self._same.values())
            )
            # Siblings get the row of the x that they share.
            for table in (self._sums, self._maxima):
                table.index_copy_(0, rows, table.index_select(0, like))
        if self._rows and dist.is_initialized() and dist.get_world_size(group) > 1:
            # Two reductions for all operands together.
            dist.all_reduce(self._sums, dist.ReduceOp.SUM, group=group)
            dist.all_reduce(self._maxima, dist.ReduceOp.MAX, group=group)
        return torch.cat([self._sums, self._maxima], dim=1)

    def statistics(self, table: torch.Tensor) -> list[Statistics]:
        """Return the rows of a table that came to the host."""
        found = []
        for (name, role), index in self._rows.items():
            format = self._formats.get((name, role))
            if format is None:
                continue
            numbers = table[index].tolist()
            made = statistics_of(self.step, name, role, format, numbers[:WIDTH], numbers[WIDTH:])
            found += [made] if made is not None else []
        return found

    def _before(self, name: str, layer: Float8Linear, args: Any, kwargs: dict[str, Any]) -> None:
        if is_metadata_inference():
            return
        # Forwards under no_grad count here: the warning is for steps that call no layer.
        self._called = True
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or name in self._calls:
            return
        with torch.no_grad():
            x: torch.Tensor = args[0] if args else kwargs["input"]
            weight = weight_beside_forward(layer)
            plan = plan_of(layer, weight)
            recipe = plan.recipe
            dtype = autocast_dtype(x.device.type) or x.dtype
            sources = sources_of(layer, recipe)
            if is_dtensor(weight):
                # the parts that this rank multiplies
                x, weight, _, _, sources, _ = place(layer, plan, weight, x, None, sources)
            self._calls[name] = call = plan, dtype, sources
            # An x that comes in float8 has no high-precision values to compare with.
            if not isinstance(x, Float8Tensor):
                self._note_x(name, x, recipe.fprop.a, dtype, sources.x)
            if recipe.fprop.b is not None and self.wants(name, "w"):
                self._note_weight(name, layer, weight, recipe.fprop.b, call)

    def _note_x(
        self, name: str, x: torch.Tensor, format: Float8Format | None, dtype: torch.dtype, source: LayerSource
    ) -> None:
        """Measure an x once, however many siblings share it: they cast it once."""
        if format is None or not self.wants(name, "x"):
            return
        # An x that was written to since is another one.
        noted = _Noted(weakref.ref(x), x._version, format, dtype, source, self._rows[name, "x"])
        if self._last_x is not None and noted.is_like(self._last_x):
            self._formats[name, "x"], self._same[noted.row] = format, self._last_x.row
            return
        self._note(name, "x", x, format, dtype, source)
        self._last_x = noted

    def _note_weight(
        self,
        name: str,
        layer: Float8Linear,
        weight: torch.Tensor,
        format: Float8Format,
        call: Call,
    ) -> None:
        if isinstance(weight, Float8Tensor):
            shard = layer._f8sub.conversion.record_of(layer, "weight").shard
            if shard is None or not shard.master.numel() or weight.rowwise is None:
                # This rank has nothing to add: the row is that of other ranks.
                self.take(name, "w", format, ())
                return
            # High precision has the shard alone, so the gathered data is cut to it.
            values = shard.values.to(shard.dtype).to(weight.device)
            row, col = (a - b for a, b in zip(shard.layout.offset, shard.layout.origin, strict=True))
            self.take(name, "w", format, [(values, part_of(weight.rowwise, row, col, *values.shape))])
            return
        master = master_of(weight) if isinstance(weight, Weight) else weight
        if master is None:
            return  # codes alone
        values = master.plain if isinstance(master, Weight) else master
        operand = weight_rowwise(weight, call)
        if isinstance(operand, Operand):
            self.take(name, "w", operand.format, [(values.to(call[1]), operand)])

    def _after(self, name: str, layer: Float8Linear, args: Any, y: torch.Tensor) -> None:
        if not y.requires_grad or name not in self._calls or name in self._seen:
            return
        self._seen.add(name)
        plan, dtype, _ = self._calls[name]
        recipe = plan.recipe
        if (format := recipe.dgrad.a or recipe.wgrad.a) is not None:
            # dgrad reads dy, or wgrad does where dgrad stays in high precision.
            y.register_hook(functools.partial(self._note_dy, name, format))
        with torch.no_grad():
            local = y.to_local() if is_dtensor(y) else y
            self._note(name, "y", local, recipe.fprop.a, dtype, CURRENT)
        if self.wants(name, "dx") or self.wants(name, "dw"):
            # The hook of y sees dy; that of the node dx and dw.
            node = node_of(y, "Float8Matmul")
            node.register_hook(functools.partial(self._note_gradients, name, recipe))

    def _note_gradients(self, name: str, recipe: Recipe, gradients: Any, _: Any) -> None:
        """Measure dx and dw, which the first backward of a step computes."""
        with torch.no_grad():
            for role, found, format in zip(
                ("dx", "dw"), gradients, (recipe.dgrad.a, recipe.fprop.b), strict=False
            ):
                if found is not None and (name, role) not in self._formats:
                    self._note(name, role, found, format, found.dtype, CURRENT)

    def _note_dy(self, name: str, format: Float8Format, dy: torch.Tensor) -> None:
        if (name, "dy") in self._formats:
            return
        with torch.no_grad():
            local = dy.to_local() if is_dtensor(dy) else dy
            self._note(name, "dy", local, format, local.dtype, self._calls[name][2].dy)

    def _note(
        self,
        name: str,
        role: str,
        tensor: torch.Tensor,
        format: Float8Format | None,
        dtype: torch.dtype,
        source: LayerSource,
    ) -> None:
        if format is None or not self.wants(name, role):
            return
        matrix = tensor.detach().reshape(-1, tensor.shape[-1]).to(dtype)
        stochastic = format.rounding is Rounding.STOCHASTIC
        with torch.random.fork_rng([matrix.device] if matrix.is_cuda else [], enabled=stochastic):
            operand = quantize(matrix, format, None, source).rowwise  # then the layer draws the same numbers
        if operand is not None:
            self.take(name, role, format, [(matrix, operand)])

    def wants(self, name: str, role: str) -> bool:
        """Return whether there is a row for it."""
        return (name, role) in self._rows

    def has(self, name: str, role: str) -> bool:
        """Return whether its row was taken in this step."""
        return (name, role) in self._formats

    def take(
        self, name: str, role: str, format: Float8Format, parts: Iterable[tuple[torch.Tensor, Operand]]
    ) -> None:
        """Add up the statistics of the parts of an operand: each in the dtype that was cast, and its float8 data."""
        self._formats[name, role] = format
        index = self._rows[name, role]
        for values, operand in parts:
            if values.numel():
                add_measured(values, operand, self._sums[index], self._maxima[index])


def node_of(y: torch.Tensor, function: str) -> torch.autograd.graph.Node:
    """Return the node nearest to a result whose gradients an ``autograd.Function`` of that name computes."""
    nodes = [y.grad_fn]
    for node in nodes:
        if node is not None and node.name().startswith(function):
            return node
        nodes += [] if node is None else [next_node for next_node, _ in node.next_functions]
    raise RuntimeError(f"no {function} returned a tensor of shape {tuple(y.shape)}")


def part_of(operand: Operand, row: int, col: int, rows: int, cols: int) -> Operand:
    """Return a part of an operand, with a scale per element if its tiles do not begin where the part does."""
    format, scale = operand.format, operand.scale_inv
    per_byte, tile = format.codes_per_byte, format.tile
    # Two elements of 4 bits are one byte.
    data = operand.data[row : row + rows, col // per_byte : -(-(col + cols) // per_byte)]
    places = ((row, rows, tile.rows), (col, cols, tile.cols))
    # The part begins where tiles do, so it has scales of its own.
    if format.is_plain and all(edge == ALL or first % edge == 0 for first, _, edge in places):
        for dim, (first, size, edge) in enumerate(places):
            scale = scale if edge == ALL else scale.narrow(dim, first // edge, -(-size // edge))
        return Operand(data, scale, format)
    scale = reference.spread(scale.float(), tile, torch.Size((rows, cols)), (row, col))
    if operand.global_scale_inv is not None:
        scale = scale * operand.global_scale_inv
    return Operand(data, scale.expand(rows, cols), each_element(format))


@functools.cache
def each_element(format: Float8Format) -> Float8Format:
    """Return a format of the same dtype with a float32 scale per element."""
    return Float8Format(format.dtype, Tile(1, 1))


class _Watch:
    """Measures products of experts: a row for each weight, by the weight's full name."""

    def __init__(self, sample: Sample, modules: dict[str, ConvertedModule]) -> None:
        self.sample = sample
        self.names = {module: name for name, module in modules.items()}
        self._seen: set[Any] = set()

    def __call__(self, module: Any, product: Multiplied) -> None:
        """Measure a product of a module of the model, the first one of its weight with a gradient."""
        call = product.call
        if module not in self.names or call is None or not product.y.requires_grad or is_metadata_inference():
            return
        attribute = name_of_read(module, module._f8sub.weights, product.weight)
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
            # [E, N, K]
            values = dw.transpose(1, 2) if call.transposed else dw
            parts = ((each, quantize_experts(each[None], format).of_group(0)) for each in values)
            self.sample.take(name, "dw", format, parts)

    def _note_gradients_of_one(self, name: str, index: int, recipe: Recipe, gradients: Any, _: Any) -> None:
        """Measure dx and dw of one expert, once; they add to what other experts have in the row."""
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
        made = present(quantize(values, format, None, source, groups=groups).rowwise)
        codes, scale, is_none = made.by_row(groups)
        operand = Operand(codes, scale.expand(codes.shape).contiguous(), each_element(format))
        # Rows of no expert may hold anything.
        codes.view(torch.uint8).masked_fill_(is_none, 0)
        self.sample.take(name, role, format, [(values.masked_fill(is_none, 0), operand)])


def _cast_alone(values: torch.Tensor, format: Float8Format) -> tuple[torch.Tensor, Operand]:
    """Return one expert's part of an operand, and its float8 data."""
    return values, present(quantize(values.contiguous(), format, None).rowwise)


def _nodes_of_experts(y: torch.Tensor) -> list[torch.autograd.graph.Node]:
    """Return the nodes that compute the experts' gradients, where each expert is a product of its own."""
    following = [] if y.grad_fn is None else [node for node, _ in y.grad_fn.next_functions]
    return [node for node in following if node is not None and node.name().startswith("Float8Matmul")]


def _weights(
    module: ConvertedModule, attribute: str, weight: torch.Tensor, call: GroupedCall, format: Float8Format
) -> Iterator[Any]:
    """Yield each expert's values and float8 data; for a weight gathered in float8, those of this rank's shard."""
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
    shard = module._f8sub.conversion.record_of(module, attribute).shard
    if shard is None or not shard.master.numel() or weight.rowwise is None or shard.layout.folded is not None:
        return
    values, rows = shard.values, weight.shape[1]
    row, col = (a - b for a, b in zip(shard.layout.offset, shard.layout.origin, strict=True))
    # One expert [N, K] of the shard at a time.
    for first in range(0, len(values), rows):
        each = values[first : first + rows].to(shard.dtype).to(weight.device)
        yield each, part_of(weight.rowwise, row + first, col, *each.shape)
