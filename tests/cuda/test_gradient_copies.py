"""FSDP2's copies of gradients by f8sub's kernel, as it runs: torch's operator's bits, by prepared launches too."""

import pytest
import torch
import torch.distributed.fsdp  # registers the operator

from f8sub.kernels import chunk_cat
from tests.data_sets import edge_values

SHAPES = [(1024, 768), (33, 129), (256,), (1, 16), (5, 3, 32), (4097, 513)]


def gradients(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    rng = torch.Generator("cuda").manual_seed(seed)
    drawn = [torch.randn(shape, device="cuda", generator=rng).to(dtype) for shape in SHAPES]
    edges = torch.cat([values.flatten() for values in edge_values(dtype).values()]).cuda()
    return [*drawn, edges, torch.randn(4097, device="cuda", generator=rng).to(dtype)[1:]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
)
def test_bits_are_those_of_torchs_operator(ranks, dtype, wide):
    for seed in range(3):
        given = gradients(dtype, seed)
        total = sum(-(-g.shape[0] // ranks) * g[0].numel() for g in given)
        right, found = (torch.full((ranks, total), 7.0, dtype=wide, device="cuda") for _ in range(2))
        torch.ops.fsdp.chunk_cat(given, dim=0, num_chunks=ranks, out=right)
        assert chunk_cat.copied(given, found)
        assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))
