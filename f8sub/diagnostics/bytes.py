"""Predicts the bytes of every weight: weights, wire, saved for backward, transient; beside bf16's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from f8sub.convert.filters import kind_of
from f8sub.convert.products import SAVED_INPUTS, SHARED_INPUTS, Product, expert_products
from f8sub.estimator.bytes import OPERANDS, operand_bytes, saved_x_bytes, sent_bytes, tokens_bytes
from f8sub.experts.seams import seam_of
from f8sub.linear.converted import ConvertedModule, own_parameter
from f8sub.linear.float8_linear import Float8Linear
from f8sub.linear.saved_input import AUTO, FLOAT8, HIGH_PRECISION, RECOMPUTE, why_not_kept
from f8sub.text_table import text_table
from f8sub.torch_compat import is_dtensor, param_dtypes
from f8sub.weights.layout import ShardLayout, WireFormat
from f8sub.weights.primary_weight import PrimaryWeight
from f8sub.weights.weight import is_converted, local_tensor, master_of

if TYPE_CHECKING:
    from f8sub.formats import Float8Format


@dataclass(frozen=True)
class Bytes:
    """Holds the bytes that one layer, or several, take.

    Attributes:
        master: the high-precision weight; of a sharded one this rank's shard, padding included.
        codes: float8 data of a weight that stays from step to step, scale tables aside; nothing for a sharded one with
            a master.
        wire: what an all-gather of the weight fills on a rank. A step has one, two where it is resharded after forward.
        saved: of x, from forward to backward; nothing where a sibling saves the same x, or what made it does.
        transient: what backward has at once, and frees: the gathered weight, and the operands that it makes. Of several
            layers that of the largest.
    """

    master: int = 0
    codes: int = 0
    wire: int = 0
    saved: int = 0
    transient: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        added = (a + b for a, b in zip(astuple(self), astuple(other), strict=True))
        # Layers run one after another: what they free does not add up.
        return replace(Bytes(*added), transient=max(self.transient, other.transient))


@dataclass(frozen=True)
class LayerBytes:
    """Holds the bytes of one linear layer, or of one weight of experts.

    Attributes:
        fqn: its name in the model.
        shape: (N, K) of the weight that its GEMMs read, (E, N, K) of experts.
        kind: recipe and ``keep_x`` of a converted layer, "high precision" of any other.
        here: as it is.
        high_precision: as it would be in high precision.
    """

    fqn: str
    shape: tuple[int, ...]
    kind: str
    here: Bytes
    high_precision: Bytes


@dataclass(frozen=True)
class ByteAccount:
    """Holds the bytes of all linear layers and experts.

    ``str()`` is a table of MB, equal layers in one row: as they are / in high precision.

    Attributes:
        layers: in the model's order.
        tokens: tokens of one forward.
        dtype: the high precision.
    """

    layers: tuple[LayerBytes, ...]
    tokens: int
    dtype: torch.dtype

    @property
    def here(self) -> Bytes:
        """The sum of all layers, as they are."""
        return sum((layer.here for layer in self.layers), Bytes())

    @property
    def high_precision(self) -> Bytes:
        """The sum of all layers, in high precision."""
        return sum((layer.high_precision for layer in self.layers), Bytes())

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        header = [
            "MB here / in " + dtype,
            "",
            "N x K",
            "kind",
            "master",
            "codes",
            "wire",
            "saved",
            "transient",
        ]
        rows = []
        alike: dict[LayerBytes, int] = {}
        for layer in self.layers:
            # layers that differ in the numbers of their names alone
            kind = replace(layer, fqn=kind_of(layer.fqn))
            alike[kind] = alike.get(kind, 0) + 1
        for layer, count in alike.items():
            cells = _cells(sum([layer.here] * count, Bytes()), sum([layer.high_precision] * count, Bytes()))
            rows.append([layer.fqn, f"{count} x", " x ".join(map(str, layer.shape)), layer.kind, *cells])
        rows.append(["all", f"{len(self.layers)} x", "", "", *_cells(self.here, self.high_precision)])
        lines = text_table(header, rows, "lrrl" + "r" * 5)
        return "\n".join([f"{self.tokens} tokens", *lines])


def byte_account(
    model: torch.nn.Module,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    shared_inputs: Iterable[Sequence[str]] = SHARED_INPUTS,
    saved_inputs: Iterable[str] = SAVED_INPUTS,
) -> ByteAccount:
    """Count the bytes that the linear layers of ``model`` take, and nothing else; of a sharded model on this rank.

    A model that is not sharded has no wire yet: the report has that of ``fully_shard`` on all of it, padding of uneven
    shards aside, and what backward would have at once under it. ``keep_x="auto"`` is counted as eager code has it
    without hooks; compiled it is float8. Biases are left out.

    Args:
        model: converted or not, on any device, meta included.
        tokens: rows of x of every layer, in one forward.
        dtype: the high precision, FSDP2's ``param_dtype``.
        shared_inputs: groups of names; siblings of one module whose names are in one group read one x.
        saved_inputs: names of layers whose x what made it saves anyway.
    """
    anyway = frozenset(saved_inputs)
    groups = {name: tuple(group) for group in shared_inputs for name in group}
    seen: set[object] = set()
    layers = []
    linears = {fqn: module for fqn, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    # By FSDP2: a DTensor of tensor parallelism alone is not gathered.
    sharded = {module for module, _ in param_dtypes(linears.values())}
    for fqn, layer in linears.items():
        parent, _, name = fqn.rpartition(".")
        group = (parent, groups.get(name, (name,)))
        weight = WeightBytes.of(layer.weight, sharded=layer in sharded)
        x_bytes = 0 if name in anyway else tokens * weight.shape[1] * dtype.itemsize
        plain = weight.in_high_precision(x_bytes if layer.weight.requires_grad else 0, dtype)
        here, kind, key, own = plain, "high precision", None, 0
        if isinstance(layer, Float8Linear):
            how = _how(layer, saved_anyway=name in anyway)
            here, own = _in_float8(layer, weight, plain, x_bytes, tokens, how), _own_scale(layer, how)
            recipe = layer._f8sub.plan.recipe
            kind, key = f"{recipe.name}, x {layer._f8sub.keep_x}", (recipe.formats("x"), how)
        # Siblings that cast their x the same save it once.
        here = _once(here, (group, kind, key), seen, own)
        plain = _once(plain, (group, None), seen)
        layers.append(LayerBytes(fqn or "(root)", weight.shape, kind, here, plain))
    return ByteAccount(tuple(layers), tokens, dtype)


class WeightBytes(NamedTuple):
    """Describes how a weight is stored and sharded.

    Attributes:
        shape: (N, K) that GEMMs read.
        elements: of this rank's shard, padding included; of the whole where it is not sharded by FSDP2.
        world: how many such shards there are.
        layout: of the shards; None where it is not sharded by FSDP2.
        master: what holds the values in high precision; None where nothing does.
    """

    shape: tuple[int, int]
    elements: int
    world: int
    layout: ShardLayout | None
    master: torch.Tensor | None

    @classmethod
    def of(cls, weight: torch.Tensor, *, sharded: bool) -> WeightBytes:
        """Describe a parameter; one of experts counts as the matrix of all experts' rows."""
        local = local_tensor(weight)
        master = master_of(local) if isinstance(local, PrimaryWeight) else local
        if is_dtensor(weight) and sharded:
            layout = ShardLayout.of(weight)
            # FSDP2 fills shards up to chunks of one size.
            elements = layout.chunk * layout.shape[1 - layout.dim]
            return cls(layout.shape, elements, layout.world, layout, master)
        shape = local.numel() // local.shape[-1], local.shape[-1]
        return cls(shape, local.numel(), 1, None, master)

    def in_high_precision(self, saved: int, dtype: torch.dtype) -> Bytes:
        """Return the bytes of a layer that stays in high precision and saves so many bytes of x."""
        master = 0 if self.master is None else self.elements * self.master.dtype.itemsize
        gathered = self.world * self.elements * dtype.itemsize
        return Bytes(master, 0, gathered, saved, gathered)

    def sent(self, format: Float8Format) -> int:
        """Return the bytes of float8 data that this rank sends."""
        if self.layout is None:
            return sent_bytes(format, *self.shape)
        rows, width = WireFormat(format, self.layout).padded_shape
        return rows * width


def _how(layer: Float8Linear, *, saved_anyway: bool) -> str:
    """Return how eager code keeps the layer's x: a value of ``keep_x`` other than "auto"."""
    if layer._f8sub.keep_x != AUTO:
        return layer._f8sub.keep_x
    # High precision adds nothing to what is saved anyway.
    free = saved_anyway and why_not_kept(layer._f8sub.plan.recipe, HIGH_PRECISION) is None
    return HIGH_PRECISION if free else FLOAT8


def _in_float8(
    layer: Float8Linear, weight: WeightBytes, plain: Bytes, x_bytes: int, tokens: int, how: str
) -> Bytes:
    """Return the bytes of a converted layer, given ``plain``, those in high precision."""
    row, made = layer._f8sub.plan.recipe.fprop.b, sum(_made_in_backward(layer, weight.shape, tokens, how))
    saved = _saved(layer, weight.shape[1], x_bytes, tokens, how)
    # fprop in high precision: so is what is gathered.
    if row is None:
        return replace(plain, saved=saved, transient=plain.wire + made)
    cast = operand_bytes(row, *weight.shape)
    wire = weight.world * weight.sent(row) if layer._f8sub.float8_all_gather else plain.wire
    # Not sharded: the float8 data stays as long as the weight does not change.
    if weight.layout is None:
        return Bytes(plain.master, cast, wire, saved, wire + made)
    if layer._f8sub.float8_all_gather:
        # Without a master the shard itself is float8 data.
        held = weight.sent(row) if weight.master is None else 0
        return Bytes(plain.master, held, wire, saved, wire + made)
    # Cast from what was gathered, in forward and in backward.
    return Bytes(plain.master, 0, wire, saved, wire + cast + made)


def _saved(layer: Float8Linear, cols: int, x_bytes: int, tokens: int, how: str) -> int:
    """Return the bytes that the layer saves of an x (tokens, cols), which adds ``x_bytes`` in high precision."""
    if not layer.weight.requires_grad:
        return 0
    return saved_x_bytes(layer._f8sub.plan.recipe, tokens, cols, x_bytes, how) + _own_scale(layer, how)


def _own_scale(layer: Float8Linear, how: str) -> int:
    """Return the bytes of the delayed scale that a layer saves beside a high-precision x, shared with no sibling."""
    kept = how == HIGH_PRECISION and layer._f8sub.plan.recipe.formats("x")[1] is not None
    return 4 if kept and layer._f8sub.plan.recipe.delayed is not None else 0


def _made_in_backward(layer: Float8Linear, shape: tuple[int, int], tokens: int, how: str) -> Iterator[int]:
    """Yield the bytes of each float8 operand of dgrad and wgrad that is neither saved nor a view of another."""
    recipe, (rows, cols) = layer._f8sub.plan.recipe, shape
    (x_row, x_col), (w_row, w_col), (dy_row, dy_col) = (recipe.formats(name) for name in OPERANDS)

    def is_view(row: Float8Format | None, col: Float8Format) -> bool:
        # A transpose of the same bytes.
        alike = row is not None and row.dtype == col.dtype and row.tile.is_transpose_of(col.tile)
        return layer._f8sub.plan.any_layout and alike and col.codes_per_byte == 1

    if w_col is not None and not is_view(w_row, w_col):
        yield operand_bytes(w_col, cols, rows)
    if dy_row is not None:
        yield operand_bytes(dy_row, tokens, rows)
    if not layer.weight.requires_grad:
        return
    if dy_col is not None and not is_view(dy_row, dy_col):
        yield operand_bytes(dy_col, rows, tokens)
    # Backward computes it from the rowwise operand that was saved.
    derived = how == RECOMPUTE and not (x_col is not None and is_view(x_row, x_col))
    if x_col is not None and (how == HIGH_PRECISION or derived):
        yield operand_bytes(x_col, cols, tokens)


def _once(counted: Bytes, key: object, seen: set[object], own: int = 0) -> Bytes:
    """Return ``counted``, with only ``own`` bytes saved if ``key`` was met before."""
    if not counted.saved:
        return counted
    if key in seen:
        return replace(counted, saved=own)
    seen.add(key)
    return counted


def _cells(here: Bytes, high_precision: Bytes) -> list[str]:
    pairs = zip(astuple(here), astuple(high_precision), strict=True)
    return [_megabytes(a) if a == b else f"{_megabytes(a)} / {_megabytes(b)}" for a, b in pairs]


def _megabytes(count: int) -> str:
    return "0" if not count else f"{count / 1e6:,.0f}" if count >= 1e8 else f"{count / 1e6:.3g}"


def expert_bytes(model: torch.nn.Module, tokens: int, dtype: torch.dtype) -> Iterator[LayerBytes]:
    """Count the bytes of each weight of experts whose seam is known, however the tokens are divided among experts.

    Args:
        model: converted or not; of a sharded one this rank's part counts.
        tokens: tokens of one forward, before they are sent to experts.
        dtype: the high precision, FSDP2's ``param_dtype``.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    found = {fqn: module for fqn, module in modules.items() if seam_of(module) is not None}
    sharded = {module for module, _ in param_dtypes(found.values())}
    for fqn, module in found.items():
        for product in expert_products(model, fqn, None):
            name = product.fqn.removeprefix(f"{fqn}.")
            weight = WeightBytes.of(own_parameter(module, name), sharded=module in sharded)
            yield _described(module, name, product, weight, round(tokens * product.uses), dtype)


def _described(
    module: Any, name: str, product: Product, weight: WeightBytes, rows: int, dtype: torch.dtype
) -> LayerBytes:
    """Count the bytes of one weight that multiplies ``rows`` tokens, those of all experts together."""
    learns = own_parameter(module, name).requires_grad
    x = 0 if product.shares_x or not learns else rows * product.cols * dtype.itemsize
    plain = weight.in_high_precision(x, dtype)
    shape = product.experts, product.rows, product.cols
    if not is_converted(module):
        return LayerBytes(product.fqn, shape, "high precision", plain, plain)
    here = _experts_in_float8(module, name, product, weight, plain, rows)
    return LayerBytes(product.fqn, shape, module._f8sub.plan.recipe.name, here, plain)


def _experts_in_float8(
    module: ConvertedModule, name: str, product: Product, weight: WeightBytes, plain: Bytes, rows: int
) -> Bytes:
    plan, format = module._f8sub.plan, module._f8sub.format_of(module, name)
    recipe, gathered = plan.recipe, module._f8sub.is_gathered(module, name)
    dy_row, dy_col = recipe.formats("dy")
    learns = getattr(module, name).requires_grad
    saved = plain.saved
    if saved:
        groups = {"experts": product.experts, "multiple": plan.multiple}
        saved = saved_x_bytes(recipe, rows, product.cols, saved, FLOAT8, **groups)
    wire = weight.world * weight.sent(format) if gathered and format is not None else plain.wire
    made = _weight_made_in_backward(module, product)
    if dy_row is not None:
        made += tokens_bytes(dy_row, rows, product.rows, product.experts, 1, contracted=False)
    if dy_col is not None and learns:
        made += tokens_bytes(dy_col, rows, product.rows, product.experts, plan.multiple, contracted=True)
    codes = 0
    if format is not None and gathered and weight.layout is not None:
        codes = weight.sent(format)
    elif format is not None and weight.layout is None:
        codes = operand_bytes(format, *weight.shape)
    return Bytes(plain.master, codes, wire, saved, wire + made)


def _weight_made_in_backward(module: ConvertedModule, product: Product) -> int:
    """Return the bytes of the columnwise operand; 0 if it is a view of the rowwise data."""
    row, col = module._f8sub.plan.recipe.formats("w")
    if col is None or (row is not None and row.tile.is_transpose_of(col.tile)):
        return 0
    return product.experts * operand_bytes(col, product.cols, product.rows)
