"""What stands in for parts that older torch lacks does what torchtitan asks of them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from tests.integrations.torchtitan import older_torch


def older(mask: Any, B: Any, H: Any, Q_LEN: int, KV_LEN: int, device: str) -> Any:
    """As torch 2.11 has it: full blocks are always apart, and no argument says so."""
    return create_block_mask(mask, B, H, Q_LEN, KV_LEN, device=device)


def test_a_mask_has_its_full_blocks_apart_or_is_refused():
    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    create = torch.compile(older_torch.with_full_blocks_apart(older), backend="eager", fullgraph=True)
    mask = create(causal, 1, None, 512, 512, device="cpu", separate_full_blocks=True)
    assert mask.kv_num_blocks.flatten().tolist() == [1, 1, 1, 1]
    assert mask.full_kv_num_blocks.flatten().tolist() == [0, 1, 2, 3]
    with pytest.raises(NotImplementedError, match="keeps full blocks apart"):
        older_torch.with_full_blocks_apart(older)(
            causal, 1, 1, 1, 1, device="cpu", separate_full_blocks=False
        )


def test_modules_of_a_list_are_sharded_each_by_itself_unless_they_share_a_parameter():
    groups: list[tuple[Any, dict[str, Any]]] = []
    shard = older_torch.with_groups_apart(lambda module, **how: groups.append((module, how)))
    norm, head, tied = nn.RMSNorm(16), nn.Linear(16, 16), nn.Embedding(16, 16)
    tied.weight = head.weight
    for modules in (norm, [norm, head], [tied, norm, head]):
        shard(modules, mesh="mesh")
    assert [module for module, _ in groups] == [norm, norm, head, [tied, norm, head]]
    assert all(how == {"mesh": "mesh"} for _, how in groups)
