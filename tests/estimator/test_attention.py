"""What an estimate says of attention in float8."""

import re

import pytest

import f8sub
from f8sub.estimator.advice import gain_of_attention
from f8sub.estimator.gpus import H100, H200


@pytest.mark.parametrize(
    ("sequence", "gain"),
    [(1024, None), (2048, None), (4096, None), (8192, 1.13), (16384, 1.185), (131072, 1.24)],
)
def test_between_the_measured_lengths(sequence, gain):
    found = gain_of_attention(H200, sequence, 128)
    assert found == (gain if gain is None else pytest.approx(gain))
    assert gain_of_attention(H100, sequence, 128) == found
    assert gain_of_attention(H200, sequence, 64) is None


@pytest.mark.parametrize(("sequence", "least", "most"), [(8192, 1.02, 1.05), (32768, 1.06, 1.13)])
def test_of_a_step(sequence, least, most):
    """Four blocks were 1.04 times as fast with 8192 tokens and 1.11 times with 32768."""
    page = str(f8sub.estimate("llama3-8b", tokens=sequence, sequence=sequence))
    told = re.search(
        r"attend_in_float8\(model\)\s+makes attention (\S+)\s+times as fast and\s+the\s+step (\S+)", page
    )
    assert told is not None, page
    assert least <= float(told[2]) <= most


def test_short_sequences_and_other_gpus_say_nothing():
    assert "attend_in_float8" not in str(f8sub.estimate("llama3-8b", tokens=8192, sequence=2048))
    assert "attend_in_float8" not in str(f8sub.estimate("llama3-8b", gpus="B200"))
