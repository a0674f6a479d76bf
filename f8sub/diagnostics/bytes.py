"""Predicts the bytes of every weight: weights, wire, saved for backward, transient; beside bf16's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from f8sub.convert.products import (
    SAVED_INPUTS,
    SHARED_INPUTS,
    Product,
    expert_products,
    kind_of,
    linear_products,
)
from f8sub.estimator.bytes import OPERANDS, operand_bytes, saved_x_bytes, sent_bytes, tokens_bytes
from f8sub.experts.seams import seam_of
from f8sub.linear.saved_input import AUTO, FLOAT8, HIGH_PRECISION, RECOMPUTE, why_not_kept
from f8sub.text_table import text_table
from f8sub.torch_compat import is_dtensor, param_dtypes
from f8sub.weights.layout import ShardLayout, WireFormat
from f8sub.weights.primary_weight import PrimaryWeight
from f8sub.weights.weight import is_converted, local_tensor, master_of, own_parameter, parameters_of

if TYPE_CHECKING:
    from f8sub.formats import Float8Format
    from f8sub.linear.converted import LayerState


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
            "layers",
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
            rows.append([layer.fqn, count, " x ".join(map(str, layer.shape)), layer.kind, *cells])
        rows.append(["all", len(self.layers), "", "", *_cells(self.here, self.high_precision)])
        lines = text_table(header, rows, "lrrl" + "r" * 5)
        return "\n".join([f"{self.tokens} tokens", *lines])


def byte_account(
    model: torch.nn.Module,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    shared_inputs: Iterable[Sequence[str]] = SHARED_INPUTS,
    saved_inputs: Iterable[str] = SAVED_INPUTS,
) -> ByteAccount:
    """Count the bytes that linear layers and experts take, and nothing else; of a sharded model on this rank.

    A model that is not sharded has no wire yet: the report has that of ``fully_shard`` on all of it, padding of uneven
    shards aside, and what backward would have at once under it. ``keep_x="auto"`` is counted as eager code has it
    without hooks; compiled it is float8. Biases are left out. Of experts those count whose class is known, however the
    tokens are divided among them.

    Args:
        model: converted or not, on any device, meta included.
        tokens: rows of x of every layer, in one forward; of experts before they are sent to these.
        dtype: the high precision, FSDP2's ``param_dtype``.
        shared_inputs: groups of names; siblings of one module whose names are in one group read one x.
        saved_inputs: names of layers whose x what made it saves anyway.
    """
    anyway = frozenset(saved_inputs)
    groups = {name: tuple(group) for group in shared_inputs for name in group}
    modules: dict[str, Any] = dict(model.named_modules())
    experts = [fqn for fqn, module in modules.items() if seam_of(module) is not None]
    products = linear_products(model, {}, groups)
    products += [product for fqn in experts for product in expert_products(model, fqn, None)]
    # By FSDP2: a DTensor of tensor parallelism alone is not gathered.
    sharded = {module for module, _ in param_dtypes({modules[p.module]: None for p in products})}
    seen: set[object] = set()
    layers = []
    for product in products:
        module = modules[product.module]
        weight = WeightBytes.of(own_parameter(module, product.attribute), sharded=module in sharded)
        saved_anyway = not product.experts and product.fqn.rpartition(".")[2] in anyway
        counted = _Counted(
            module, product, weight, round(tokens * product.uses) if product.experts else tokens
        )
        layers.append(counted.beside_high_precision(dtype, saved_anyway, seen))
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


class _Counted(NamedTuple):
    """Counts the bytes of one product of a module.

    Attributes:
        module: a linear layer, or a module of experts.
        product: the product.
        weight: how its weight is stored.
        tokens: rows of x; of experts those of all of them.
    """

    module: Any
    product: Product
    weight: WeightBytes
    tokens: int

    def beside_high_precision(self, dtype: torch.dtype, saved_anyway: bool, seen: set[object]) -> LayerBytes:
        """Return the bytes as they are, and in high precision; an x that is in ``seen`` is saved already."""
        product, weight = self.product, self.weight
        x_bytes = 0 if saved_anyway else self.tokens * self.cols * dtype.itemsize
        plain = weight.in_high_precision(x_bytes if self.learns else 0, dtype)
        here, kind, key, own = plain, "high precision", None, 0
        if is_converted(self.module):
            state = self.module._f8sub
            how = _how(state, saved_anyway=saved_anyway)
            here, own = self.in_float8(plain, x_bytes, how), _own_scale(state, how)
            recipe = state.plan.recipe
            kind = recipe.name if product.experts else f"{recipe.name}, x {state.keep_x}"
            key = recipe.formats("x"), how
        # Siblings that cast their x the same save it once.
        here = _once(here, (product.reads, kind, key), seen, own)
        plain = _once(plain, (product.reads, None), seen)
        shape = (product.experts, product.rows, product.cols) if product.experts else weight.shape
        return LayerBytes(product.fqn or "(root)", shape, kind, here, plain)

    @property
    def rows(self) -> int:
        """N of what the rank's GEMMs read: tensor parallelism cuts linear layers."""
        return self.product.rows if self.product.experts else self.weight.shape[0]

    @property
    def cols(self) -> int:
        """K of the same."""
        return self.product.cols if self.product.experts else self.weight.shape[1]

    @property
    def learns(self) -> bool:
        """True if the weight takes a gradient."""
        return any(p.requires_grad for p in parameters_of(self.module, self.product.attribute))

    def in_float8(self, plain: Bytes, x_bytes: int, how: str) -> Bytes:
        """Return the bytes of a converted module's product, given ``plain``, those in high precision.

        Args:
            plain: the bytes in high precision.
            x_bytes: what x adds in high precision.
            how: a value of ``keep_x`` other than "auto".
        """
        state, weight, name = self.module._f8sub, self.weight, self.product.attribute
        plan, saved, made = state.plan, 0, sum(self.made_in_backward(how))
        if self.learns:
            groups = {"experts": self.product.experts, "multiple": plan.multiple}
            saved = saved_x_bytes(plan.recipe, self.tokens, self.cols, x_bytes, how, **groups)
            saved += _own_scale(state, how)
        format, gathered = state.format_of(self.module, name), state.is_gathered(self.module, name)
        # Where fprop reads no float8 data that could be stored, what is gathered is in high precision, too.
        if plan.recipe.fprop.b is None or format is None:
            return replace(plain, saved=saved, transient=plain.wire + made)
        cast = operand_bytes(format, *weight.shape)
        wire = weight.world * weight.sent(format) if gathered else plain.wire
        # Not sharded: the float8 data stays as long as the weight does not change.
        if weight.layout is None:
            return Bytes(plain.master, cast, wire, saved, wire + made)
        if gathered:
            # Without a master the shard itself is float8 data.
            held = weight.sent(format) if weight.master is None else 0
            return Bytes(plain.master, held, wire, saved, wire + made)
        # Cast from what was gathered, in forward and in backward.
        return Bytes(plain.master, 0, wire, saved, wire + cast + made)

    def made_in_backward(self, how: str) -> Iterator[int]:
        """Yield the bytes of each float8 operand of dgrad and wgrad that is neither saved nor a view of another."""
        plan, experts = self.module._f8sub.plan, self.product.experts
        (x_row, x_col), (w_row, w_col), (dy_row, dy_col) = (plan.recipe.formats(name) for name in OPERANDS)
        multiple = plan.multiple if experts else 1

        def is_view(row: Float8Format | None, col: Float8Format, in_place: bool) -> bool:
            # A transpose of the same bytes.
            alike = row is not None and row.dtype == col.dtype and row.tile.is_transpose_of(col.tile)
            return in_place and alike and col.codes_per_byte == 1

        # Kernels of experts read each expert's matrix in any layout, and tokens in one.
        if w_col is not None and not is_view(w_row, w_col, plan.any_layout or experts > 0):
            yield max(1, experts) * operand_bytes(w_col, self.cols, self.rows)
        if dy_row is not None:
            yield tokens_bytes(dy_row, self.tokens, self.rows, experts, 1, contracted=False)
        if not self.learns:
            return
        if dy_col is not None and not is_view(dy_row, dy_col, plan.any_layout):
            yield tokens_bytes(dy_col, self.tokens, self.rows, experts, multiple, contracted=True)
        # Backward computes it from the rowwise operand that was saved.
        derived = how == RECOMPUTE and not (x_col is not None and is_view(x_row, x_col, plan.any_layout))
        if x_col is not None and (how == HIGH_PRECISION or derived):
            yield tokens_bytes(x_col, self.tokens, self.cols, experts, multiple, contracted=True)


def _how(state: LayerState, *, saved_anyway: bool) -> str:
    """Return how eager code keeps the module's x: a value of ``keep_x`` other than "auto"."""
    if state.keep_x != AUTO:
        return state.keep_x
    # High precision adds nothing to what is saved anyway.
    free = saved_anyway and why_not_kept(state.plan.recipe, HIGH_PRECISION) is None
    return HIGH_PRECISION if free else FLOAT8


def _own_scale(state: LayerState, how: str) -> int:
    """Return the bytes of the delayed scale that a layer saves beside a high-precision x, shared with no sibling."""
    kept = how == HIGH_PRECISION and state.plan.recipe.formats("x")[1] is not None
    return 4 if kept and state.plan.recipe.delayed is not None else 0


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
