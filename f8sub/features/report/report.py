"""What a conversion did: every linear layer, converted or with the reason why not, and all other weights."""

import math
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from f8sub.convert.checks import SKIP_REASON, is_converted
from f8sub.features.defaults.defaults import MIN_DIM, is_small
from f8sub.features.layer_kinds.layer_kinds import kind_of, name_of
from f8sub.features.report.other_weights import OtherWeights, active_share_of_linear, other_weights
from f8sub.linear.float8_linear import Float8Linear

NOT_SEEN = "convert_to_float8 has not seen it"

WIDTH, NAME_WIDTH, SHAPE_WIDTH = 100, 46, 22
"""Columns of a report, and of the names and shapes in it; what is longer is wrapped or shortened."""

MOST_ROWS = 16
"""Rows that a report shows of layers with one reason; the largest come first where there are more."""


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One linear layer.

    Attributes:
        fqn: its name in the model.
        in_features: K.
        out_features: N.
        converted: whether it is a ``Float8Linear``.
        detail: recipe and backend of a converted layer and what deviates from defaults; the reason of any other.
        multiplications: of one token: K * N; of a layer in a list of experts that times the share of these that a
            token is sent to.
    """

    fqn: str
    in_features: int
    out_features: int
    converted: bool
    detail: str
    multiplications: float


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What runs in float8. ``str()`` is a page: the summary, then equal layers in one row, by what became of them.

    FLOPs are those of products with weights; attention scores are none. Shares are of the whole model's.

    Attributes:
        layers: every linear layer, in the model's order.
        idle_patterns: of options given by patterns, those that do nothing, with the reason.
        bytes: the ``ByteAccount``, where a number of tokens was given; ``str()`` of it is a table.
        others: what multiplies by weights and is no nn.Linear; experts alone may be converted.
        parameters: how many the model has.
        parameters_in_float8: how many of them are weights of converted layers and experts.
        experts: what float8 gains of each kind of experts, one sentence each.
    """

    layers: tuple[LayerReport, ...]
    idle_patterns: tuple[str, ...] = ()
    bytes: Any = None
    others: tuple[OtherWeights, ...] = ()
    parameters: int = 0
    parameters_in_float8: int = 0
    experts: tuple[str, ...] = ()

    @property
    def flops_share(self) -> float:
        """Share of the model's FLOPs that run in float8, 0 to 1; of ``others`` convolutions are not counted."""
        converted = sum(layer.multiplications for layer in self.layers if layer.converted)
        converted += sum(other.multiplications or 0.0 for other in self.others if other.converted)
        return converted / max(self._multiplications, 1)

    @property
    def parameters_share(self) -> float:
        """Share of the model's parameters that are weights of converted layers, 0 to 1."""
        return self.parameters_in_float8 / max(self.parameters, 1)

    @property
    def summary(self) -> str:
        """One line for a log."""
        converted = [layer for layer in self.layers if layer.converted]
        others = [other for other in self.others if other.converted]
        and_others = f" and {len(others)} modules of experts" if others else ""
        line = (
            f"{len(converted)} of {len(self.layers)} linear layers{and_others} in float8, {self.flops_share:.1%} of "
            f"FLOPs, {self.parameters_share:.1%} of parameters"
        )
        if details := {layer.detail for layer in converted} | {other.detail for other in others}:
            line += f" ({'; '.join(sorted(details))})"
        if left := [other for other in self.others if other.reason]:
            reasons = "; ".join(sorted({other.reason for other in left}))
            line += f"; not in float8, {len(left)} modules with weights of 3 dimensions: {reasons}"
        return line + (f"; idle patterns: {', '.join(self.idle_patterns)}" if self.idle_patterns else "")

    @property
    def _multiplications(self) -> float:
        others = sum(other.multiplications or 0.0 for other in self.others)
        return others + sum(layer.multiplications for layer in self.layers)

    def __str__(self) -> str:
        sections = self._sections()
        lines = [self.summary, *([_row("", "", "shape", "FLOPs", "params")] if sections else [])]
        for title, rows in sections.items():
            lines += [*_wrapped(title), *rows]
        return "\n".join([*lines, *(line for note in self._notes() for line in _wrapped(note))])

    def _sections(self) -> dict[str, list[str]]:
        """Rows by what became of their layers, converted ones first."""
        found: dict[str, list[_Weights]] = defaultdict(list)
        for layer in sorted(self.layers, key=lambda layer: not layer.converted):
            shape = layer.out_features, layer.in_features
            weights = _Weights(layer.fqn, _shown(shape), math.prod(shape), layer.multiplications)
            found[f"{'' if layer.converted else 'not '}in float8: {layer.detail}"].append(weights)
        for other in sorted(self.others, key=lambda other: not other.converted):
            shown = _shown(other.shapes[0]) + (", ..." if len(other.shapes) > 1 else "")
            weights = _Weights(other.fqn, shown, other.parameters, other.multiplications)
            found[f"{'' if other.converted else 'not '}in float8: {other.detail}"].append(weights)
        return {title: self._rows(weights) for title, weights in found.items()}

    def _rows(self, weights: list["_Weights"]) -> list[str]:
        """A line for all weights of one kind and shape."""
        rows: dict[tuple[str, str], list[_Weights]] = defaultdict(list)
        for each in weights:
            rows[kind_of(each.fqn), each.shape].append(each)
        largest = sorted(rows, key=lambda key: -sum(each.elements for each in rows[key]))[:MOST_ROWS]
        lines = []
        for alike in (rows[key] for key in rows if key in largest):
            known = [each.multiplications for each in alike if each.multiplications is not None]
            flops = f"{sum(known) / max(self._multiplications, 1):.1%}" if known else "?"
            elements = f"{sum(each.elements for each in alike) / max(self.parameters, 1):.1%}"
            name = name_of([each.fqn for each in alike])
            lines.append(_row(name, f"{len(alike)} x", alike[0].shape, flops, elements))
        more = len(rows) - len(largest)
        return [*lines, f"  and {more} kinds of smaller layers"] if more else lines

    def _notes(self) -> list[str]:
        notes = list(self.experts)
        if any("(default)" in layer.detail for layer in self.layers if not layer.converted):
            notes.append("(default): skip_defaults=False converts these too.")
        if is_small([(la.in_features, la.out_features) for la in self.layers if la.converted]):
            notes.append(
                f"Layers with fewer than {MIN_DIM} features in or out gain no time in float8 on a GPU; much of this "
                "model is such layers."
            )
        return notes


class _Weights(NamedTuple):
    """What a row shows of one layer or module; ``multiplications`` None where they are not known."""

    fqn: str
    shape: str
    elements: int
    multiplications: float | None


def layers_report(model: torch.nn.Module) -> ConversionReport:
    """What of ``model``, converted or not, sharded or not, runs in float8, and why the rest does not."""
    rows: list[LayerReport] = []
    conversions = dict.fromkeys(
        vars(module)["converted"] for module in model.modules() if is_converted(module)
    )
    idle = [pattern for conversion in conversions for pattern in conversion.options["idle_patterns"]]
    for fqn, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        if converted := isinstance(module, Float8Linear):
            detail = module.how
        else:
            detail = getattr(module, SKIP_REASON, NOT_SEEN)
        sizes = module.in_features, module.out_features
        multiplications = sizes[0] * sizes[1] * active_share_of_linear(model, fqn)
        rows.append(LayerReport(fqn or "(root)", *sizes, converted, detail, multiplications))
    weights = {layer.weight for layer in model.modules() if isinstance(layer, Float8Linear)}
    others = other_weights(model)
    in_experts = sum(other.parameters for other in others if other.converted)
    return ConversionReport(
        tuple(rows),
        tuple(dict.fromkeys(idle)),
        others=others,
        parameters=sum(p.numel() for p in model.parameters() if not is_lazy(p)),
        parameters_in_float8=sum(weight.numel() for weight in weights) + in_experts,
    )


def _row(name: str, count: str, shape: str, flops: str, parameters: str) -> str:
    if len(name) > NAME_WIDTH:
        name = f"...{name[3 - NAME_WIDTH :]}"
    return f"  {name:<{NAME_WIDTH}} {count:>6} {shape:<{SHAPE_WIDTH}} {flops:>7} {parameters:>7}"


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False)
