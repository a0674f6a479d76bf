"""What eager code saves beside the layers' x and y, counted."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from f8sub.estimator.bytes import saved_bytes
from f8sub.estimator.estimate import shapes_of
from f8sub.estimator.seconds import Run
from tests.estimator.test_adapters import TOKENS, saved


def test_what_transformers_eager_code_saves_of_a_block():
    """A Llama 3 8B's proportions, a sixteenth of its size; a model of two blocks less one of one."""

    def made(layers: int) -> torch.nn.Module:
        sizes = {"hidden_size": 256, "intermediate_size": 896, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=256, num_hidden_layers=layers, num_key_value_heads=1, **sizes)
        return LlamaForCausalLM(config).to(torch.bfloat16)

    measured = saved(made(2), adapters=True) - saved(made(1), adapters=True)
    block = next(iter(shapes_of(made(1)).blocks.values()))
    eager, kernels = (
        saved_bytes(block, None, Run(TOKENS, TOKENS, 1, checkpoint="none", compiled=False, kernels=each))
        for each in (False, True)
    )
    assert abs(eager / measured - 1) < 0.01
    assert kernels == eager - 0.88 * TOKENS * sum(p.rows + (0 if p.shares_x else p.cols) for p in block)
