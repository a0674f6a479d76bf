"""conversion_report: what a conversion did, and what it takes in bytes."""

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from f8sub.diagnostics.bytes import byte_account
from f8sub.diagnostics.expert_bytes import expert_bytes
from f8sub.diagnostics.report import ConversionReport, layers_report
from f8sub.diagnostics.report_experts import told_of_experts
from f8sub.estimator.counted_forward import Batch, count, count_of_made_up
from f8sub.estimator.shapes import SAVED_INPUTS, SHARED_INPUTS


def conversion_report(
    model: torch.nn.Module,
    tokens: int | None = None,
    *,
    batch: Batch | None = None,
    dtype: torch.dtype = torch.bfloat16,
    shared_inputs: Iterable[Sequence[str]] = SHARED_INPUTS,
    saved_inputs: Iterable[str] = SAVED_INPUTS,
) -> ConversionReport:
    """What of ``model`` runs in float8, and why the rest does not; with ``tokens``, what it takes in bytes, too.

    FLOPs are counted in one forward of ``batch``. It runs without gradients, without hooks and in high precision, on a
    copy of the modules that shares the weights. No buffer, random number, amax history or state of FSDP2 changes, and
    no rank waits for another, so one may count alone. Where the batch or the weights are on meta, or the weights are
    sharded, everything runs on meta: shapes decide, and a forward that asks for values is an error.

    Without a batch, a model of transformers is counted on meta with inputs that are made up, which takes less than a
    second for most. Of any other model FLOPs are assumed: every layer once per token. ``summary`` says which it was.

    Args:
        model: converted or not, sharded or not.
        tokens: see ``byte_account``; the arguments after it likewise. What experts gain is told by them, too.
        batch: what the model's forward takes: a mapping by name, a tuple or list by position, or one tensor.
        dtype: the high precision.
        shared_inputs: groups of names of siblings that read one x.
        saved_inputs: names of layers whose x is saved by what makes it.

    Raises:
        Float8ConfigError: the forward of ``batch`` fails.
    """
    counted = count_of_made_up(model) if batch is None else count(model, batch)
    told = tuple(told_of_experts(model, tokens))
    report = dataclasses.replace(layers_report(model, counted), experts=told)
    if tokens is None:
        return report
    account = byte_account(model, tokens, dtype, shared_inputs, saved_inputs)
    layers = (*account.layers, *expert_bytes(model, tokens, dtype))
    return dataclasses.replace(report, bytes=dataclasses.replace(account, layers=layers))
