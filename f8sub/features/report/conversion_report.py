"""conversion_report: what a conversion did, and what it takes in bytes."""

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from f8sub.features.expert_bytes.account import expert_bytes
from f8sub.features.report.report import ConversionReport, layers_report
from f8sub.features.report_experts.experts import told_of_experts
from f8sub.features.tools.byte_account import SAVED_INPUTS, SHARED_INPUTS, byte_account


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
        tokens: see ``byte_account``; the arguments after it likewise. What experts gain is told by them, too.
        dtype: the high precision.
        shared_inputs: groups of names of siblings that read one x.
        saved_inputs: names of layers whose x is saved by what makes it.
    """
    report = dataclasses.replace(layers_report(model), experts=tuple(told_of_experts(model, tokens)))
    if tokens is None:
        return report
    account = byte_account(model, tokens, dtype, shared_inputs, saved_inputs)
    layers = (*account.layers, *expert_bytes(model, tokens, dtype))
    return dataclasses.replace(report, bytes=dataclasses.replace(account, layers=layers))
