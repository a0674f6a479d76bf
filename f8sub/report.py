"""Layer 6. What a conversion did: every linear layer, converted or with the reason why not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from f8sub.byte_account import SAVED_INPUTS, SHARED_INPUTS, ByteAccount, byte_account
from f8sub.linear import Float8Linear

SKIP_REASON = "float8_skip_reason"
"""Attribute that ``convert_to_float8`` leaves on a linear layer it did not convert."""


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One linear layer.

    Attributes:
        fqn: its name in the model.
        in_features: K.
        out_features: N.
        converted: whether it is a ``Float8Linear``.
        detail: recipe and backends of a converted layer, the reason of any other.
    """

    fqn: str
    in_features: int
    out_features: int
    converted: bool
    detail: str


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """Every linear layer of a model. ``str()`` is one line for a log.

    Attributes:
        layers: in the model's order.
        idle_patterns: of a ``recipe`` or ``keep_x`` given by patterns, those that decide for no layer, with the reason.
        bytes: the account of bytes, where a number of tokens was given; ``str()`` of it is a table.
    """

    layers: tuple[LayerReport, ...]
    idle_patterns: tuple[str, ...] = ()
    bytes: ByteAccount | None = None

    @property
    def flops_share(self) -> float:
        """Share of the linear layers' multiplications that run in float8, 0 to 1."""
        total = sum(layer.in_features * layer.out_features for layer in self.layers)
        return sum(la.in_features * la.out_features for la in self.layers if la.converted) / max(total, 1)

    def __str__(self) -> str:
        converted = [layer for layer in self.layers if layer.converted]
        line = f"{len(converted)} of {len(self.layers)} linear layers in float8, {self.flops_share:.1%} of their FLOPs"
        if converted:
            line += f" ({'; '.join(sorted({layer.detail for layer in converted}))})"
        skipped = [f"{layer.fqn} ({layer.detail})" for layer in self.layers if not layer.converted]
        line += f"; not converted: {', '.join(skipped)}" if skipped else ""
        return line + (f"; idle patterns: {', '.join(self.idle_patterns)}" if self.idle_patterns else "")


def conversion_report(
    model: torch.nn.Module,
    tokens: int | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shared_inputs: Iterable[Sequence[str]] = SHARED_INPUTS,
    saved_inputs: Iterable[str] = SAVED_INPUTS,
) -> ConversionReport:
    """What of ``model`` runs in float8, and why the rest does not; with ``tokens``, what it takes in bytes, too.

    Args:
        model: converted or not, sharded or not.
        tokens: see ``byte_account``; the arguments after it likewise.
        dtype: the high precision.
        shared_inputs: groups of names of siblings that read one x.
        saved_inputs: names of layers whose x is saved by what makes it.
    """
    rows: list[LayerReport] = []
    idle: list[str] = []
    for fqn, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        if converted := isinstance(module, Float8Linear):
            plan = module.plan
            gemms = ", ".join(
                f"{g}={getattr(plan, g) or 'high precision'}" for g in ("fprop", "dgrad", "wgrad")
            )
            gather = "float8" if module.float8_all_gather else "high precision"
            detail = f"{plan.recipe.name}: {gemms}, quantize={plan.quantizers}, all-gather={gather}"
            detail += f", keep_x={module.keep_x}"
            idle += module.converted.idle_patterns
        else:
            detail = getattr(module, SKIP_REASON, "convert_to_float8 has not seen it")
        rows.append(LayerReport(fqn or "(root)", module.in_features, module.out_features, converted, detail))
    account = None if tokens is None else byte_account(model, tokens, dtype, shared_inputs, saved_inputs)
    return ConversionReport(tuple(rows), tuple(dict.fromkeys(idle)), account)
