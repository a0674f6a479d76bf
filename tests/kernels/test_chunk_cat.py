"""The copy of gradients into FSDP2's memory: torch's operator's bits, one launch for each gradient."""

from unittest import mock

import pytest
import torch
import torch.distributed.fsdp  # registers the operator

from f8sub.kernels import chunk_cat
from tests.data_sets import edge_values, gaussian, generator
from tests.kernels.interpreted import interpreted, launched

SHAPES = [(64, 96), (1, 16), (33, 129), (256,), (5, 3, 32), (2, 4100)]
"""Whole chunks, fewer rows than ranks, rows that no number of ranks divides, a vector, experts, long rows."""
DTYPES = torch.float32, torch.bfloat16, torch.float16


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    rng = generator(5)
    of_edges = torch.cat([values.flatten() for values in edge_values(dtype).values()])
    return [
        *(gaussian(shape, rng).to(dtype) for shape in SHAPES),
        of_edges,
        gaussian((513,), rng).to(dtype)[1:],
    ]


def right(given: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    torch.ops.fsdp.chunk_cat(given, dim=0, num_chunks=out.shape[0], out=out)
    return out


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@interpreted
def test_bits_are_those_of_torchs_operator(ranks):
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.bfloat16,) * 2, (torch.float32,) * 2):
        given = gradients(dtype)
        total = sum(-(-g.shape[0] // ranks) * g[0].numel() for g in given)
        expected = right(given, torch.full((ranks, total), 7.0, dtype=wide))
        found = torch.full((ranks, total), 5.0, dtype=wide)
        with mock.patch.object(chunk_cat, "LEAST", 1), launched() as names:
            assert chunk_cat.takes(given, found)
            chunk_cat.chunk_cat(given, found)
            # Prepared launches, had the interpreter any, are of the same memory.
            chunk_cat.chunk_cat(given, found)
        assert names == ["copy_chunks"] * 2 * len(given)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@interpreted
def test_what_is_left_to_torch():
    out = torch.empty(2, 2**19)
    one = torch.zeros(1024, 1024)
    assert chunk_cat.takes([one], out)
    assert not chunk_cat.takes([one], out[:, : 2**18])  # small, and not contiguous
    assert not chunk_cat.takes([one.t()[:, ::2].contiguous().t()], out)
    assert not chunk_cat.takes([one.double()], out)
    assert not chunk_cat.takes([one, one.new_zeros(0, 4)], out)
    assert not chunk_cat.takes([one[0]] * (chunk_cat.MOST + 1), out)


@interpreted
def test_rows_of_another_length_are_an_error():
    with pytest.raises(RuntimeError, match="chunks of 6 elements were copied into rows of 8"):
        chunk_cat.chunk_cat([torch.ones(4, 3)], torch.empty(2, 8))
