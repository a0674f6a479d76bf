"""Predicts what attention in float8 gains: its share of a step, and its measured speed over bf16 by length."""

import itertools
import math
from collections.abc import Sequence

from f8sub.convert.products import Product
from f8sub.estimator.gpus import Gpu
from f8sub.estimator.seconds import ATTENTION_PASSES, FULL, Run, attention_seconds

MEASURED = ((2048, 0.65), (8192, 1.13), (32768, 1.24))
"""Tokens of a sequence, and speed of attention over bf16's, forward and backward with all casts. Source:
docs/measurements/parts.md, an H200, heads of 128 features."""

HOPPERS = ("H100", "H200")
"""GPUs that have the kernels that were measured."""

HEAD = 128
"""Features of a head that backward takes on Hopper."""

LEAST_GAIN = 1.01
"""A smaller gain of a step is not worth a change of numbers."""


def gain_of_attention(gpu: Gpu, sequence: float, head: int) -> float | None:
    """Return the speed of float8 attention over bf16's, between the measured lengths; None where it is not faster."""
    first, last = MEASURED[0][0], MEASURED[-1][0]
    if gpu.name not in HOPPERS or head != HEAD or sequence < first:
        return None
    # Longer ones than were measured gain as much as the longest, at least.
    at = math.log2(min(sequence, last))
    for (a, before), (b, after) in itertools.pairwise(MEASURED):
        if at <= math.log2(b):
            gain = before + (after - before) * (at - math.log2(a)) / math.log2(b / a)
            return gain if gain > 1 else None
    return None


def advice_on_attention(products: Sequence[Product], gpu: Gpu, run: Run, step: float) -> str | None:
    """Return a sentence where attention in float8 makes a step faster; None where it does not.

    Args:
        products: of the whole model.
        gpu: where it runs.
        run: how it is trained.
        step: seconds of a step, replayed, with attention in bf16.
    """
    reading = [product for product in products if product.reads_attention]
    # Heads of one size alone: who mixes sizes is not what was measured.
    gains = {gain_of_attention(gpu, run.sequence, product.head) for product in reading}
    gain = gains.pop() if len(gains) == 1 else None
    if gain is None:
        return None
    # Only full checkpointing repeats the forward of attention.
    passes = ATTENTION_PASSES + (1 if run.checkpoint == FULL else 0)
    attention = passes * sum(attention_seconds(product, gpu, run) for product in reading)
    # What attention saves is saved of the step: nothing of it is hidden behind other work.
    faster = step / (step - attention * (1 - 1 / gain))
    if faster < LEAST_GAIN:
        return None
    return (
        f"Attention over {run.sequence:.0f} tokens, in bf16, is {attention / step:.0%} of that step. "
        f"f8sub.attend_in_float8(model) makes attention {gain:.2f} times as fast and the step {faster:.2f} times; it "
        "changes numbers, see docs/attention.md."
    )
