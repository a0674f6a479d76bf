"""attend_causally: results of sdpa, no mask, and no value that the host reads."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import f8sub
from f8sub.integrations.transformers import attend_causally
from tests.data_sets import generator

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "num_hidden_layers": 2,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}


class Reads(TorchDispatchMode):
    """Counts values that the host reads."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def made(kind: str, **options: object) -> torch.nn.Module:
    config, model = (getattr(transformers, f"{kind}{part}") for part in ("Config", "ForCausalLM"))
    return model(config(**{**SMALL, "attn_implementation": "sdpa", **options}))


@pytest.mark.parametrize(
    ("kind", "options"), [("Llama", {}), ("Qwen3", {"head_dim": 8}), ("Qwen3Moe", EXPERTS)]
)
def test_results_are_those_of_sdpa_and_the_host_reads_nothing(kind, options):
    model = made(kind, **options)
    ids = torch.randint(64, (2, 16), generator=generator(0))

    def run() -> tuple[torch.Tensor, list[torch.Tensor], int]:
        model.zero_grad()
        with Reads() as reads:
            logits = model(input_ids=ids, use_cache=False).logits
        logits.square().sum().backward()
        return logits, [parameter.grad for parameter in model.parameters()], reads.count

    logits, gradients, reads = run()
    attend_causally(model)
    without, own, none = run()
    assert reads > none == 0
    assert torch.equal(without, logits)
    assert all(map(torch.equal, own, gradients))


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("Mistral", {"sliding_window": 8}, "a window of 8 tokens"),
        ("Gemma2", {"head_dim": 8, "attn_implementation": "eager"}, "sliding_attention"),
    ],
)
def test_models_that_need_a_mask_are_an_error(kind, options, said):
    with pytest.raises(f8sub.Float8ConfigError, match=said):
        attend_causally(made(kind, **options))


def test_a_model_of_another_library_is_an_error():
    with pytest.raises(f8sub.Float8ConfigError, match="a model of transformers, got"):
        attend_causally(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("packed", ["position_ids", "cu_seq_lens_q"])
def test_several_sequences_in_one_are_an_error(packed):
    model = made("Llama")
    attend_causally(model)
    attend_causally(model)
    ids = torch.randint(64, (1, 16), generator=generator(0))
    whole = {"position_ids": torch.arange(3, 19)[None]} if packed == "cu_seq_lens_q" else {}
    model(input_ids=ids, **whole)
    given = {
        "position_ids": torch.cat([torch.arange(6), torch.arange(10)])[None],
        "cu_seq_lens_q": torch.tensor([0, 6, 16], dtype=torch.int32),
    }
    with pytest.raises(f8sub.Float8ConfigError, match="LlamaForCausalLM has several sequences in one"):
        model(input_ids=ids, **{packed: given[packed]})
