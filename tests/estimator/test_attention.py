"""What an estimate says of attention in float8."""

import re

import pytest

import f8sub
from f8sub.estimator.advice import speed_of_attention, why_attention_stays
from f8sub.estimator.gpus import H100, H200


@pytest.mark.parametrize(
    ("sequence", "speed"),
    [(1024, 0.65), (2048, 0.65), (4096, 0.89), (8192, 1.13), (16384, 1.185), (131072, 1.24)],
)
def test_between_the_measured_lengths(sequence, speed):
    assert speed_of_attention(sequence) == pytest.approx(speed)
    for gpu in (H200, H100):
        reason = why_attention_stays(gpu, sequence, {128})
        assert reason == (None if speed > 1 else f"in float8 it is {speed:.2f} times as fast over so few")
    assert "heads of 128 features, and there are some of 64" in why_attention_stays(H200, sequence, {128, 64})


@pytest.mark.parametrize(("sequence", "least", "most"), [(8192, 1.02, 1.05), (32768, 1.06, 1.13)])
def test_of_a_step(sequence, least, most):
    """Four blocks were 1.04 times as fast with 8192 tokens and 1.11 times with 32768."""
    page = str(f8sub.estimate("llama3-8b", tokens=sequence, sequence=sequence))
    told = re.search(
        r"attend_in_float8\(model\)\s+makes attention (\S+)\s+times as fast and\s+the\s+step (\S+)", page
    )
    assert told is not None, page
    assert least <= float(told[2]) <= most


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"sequence": 2048},
            r"Attention over 2,048 tokens, in bf16, is \d+% of that step; in float8 it is 0.65",
        ),
        (
            {"gpus": "B200"},
            r"Attention over 8,192 tokens, in bf16, is \d+% of that step; in float8 it was measured",
        ),
        ({"sequence": 128}, None),
    ],
)
def test_where_it_does_not_gain_the_page_says_why(options, told):
    page = " ".join(str(f8sub.estimate("llama3-8b", tokens=8192, **options)).split())
    assert "attend_in_float8" not in page
    assert re.search(told, page) if told else "Attention over" not in page
