"""``scripts/bench/titan_0_3.py`` on CPUs and gloo: ``torchrun -m tests.scripts.titan_0_3_on_cpus`` with its options."""

from typing import Any

from tests.integrations.torchtitan import cpu  # noqa: F401  (what torchtitan believes the device to be)

# isort: split
import torch
from torchtitan.models import deepseek_v3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm

from scripts.bench import titan_0_3
from tests.integrations.torchtitan import configs

for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
    setattr(torch.accelerator, name, lambda: None)
torch.accelerator.memory_stats, torch.accelerator.max_memory_reserved = dict, int
of_gpus = titan_0_3.config_of


def small_671b(attn_backend: str, moe_comm_backend: str, **others: Any) -> Any:
    """DeepSeek-V3 with all that the 671B has and torchtitan's small flavors have not, in small dimensions.

    Three dense layers, queries of a low rank, and experts in groups.
    """
    dim, vocabulary, rope, init = 256, 2048, 16, deepseek_v3._LINEAR_INIT
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=5,
        n_dense_layers=3,
        dim=dim,
        n_heads=4,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=rope,
        v_head_dim=32,
        mscale=1.0,
        dense_hidden_dim=512,
        moe_hidden_dim=128,
        num_experts=32,
        num_shared_experts=1,
        router_top_k=4,
        router_score_func="sigmoid",
        router_num_expert_groups=4,
        router_num_limited_groups=2,
        router_route_scale=2.5,
        router_route_norm=True,
        attn_backend=attn_backend,
        moe_comm_backend=moe_comm_backend,
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=rope, max_seq_len=16384, scaling="yarn", rope_factor=40.0),
    )
    return deepseek_v3.DeepSeekV3Model.Config(
        vocab_size=vocabulary,
        dim=dim,
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim, param_init=init),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=deepseek_v3._NORM_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=init),
        layers=layers,
    )


deepseek_v3.deepseekv3_configs["small"] = small_671b


def config_of(*given: Any) -> Any:
    """The config of an arm, of fewer layers and experts."""
    config = of_gpus(*given)
    training, checkpoints = config.training, config.activation_checkpoint
    asked = training.local_batch_size, training.seq_len, training.steps
    (configs.of_few_experts if given[1].model == "qwen3" else configs.on_cpu)(config)
    training.local_batch_size, training.seq_len, training.steps = asked
    config.activation_checkpoint = checkpoints
    # Inductor's code for CPUs takes minutes to compile.
    config.compile.backend = "aot_eager"
    return config


titan_0_3.config_of = config_of

if __name__ == "__main__":
    titan_0_3.main()
