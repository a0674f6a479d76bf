"""Training configs that run on CPUs: ``--module tests.integrations.torchtitan.configs --config bf16``."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config.configurable import Configurable
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.spmd_types import current_spmd_mesh
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.gpt_oss import config_registry as gpt_oss
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.models.llama3 import model_registry
from torchtitan.models.qwen3 import config_registry as qwen3
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from f8sub import titan
from tests.integrations.torchtitan.gloo import with_sums

LAYERS = 2
"""Of the debug model's six."""


def for_cpus(config: Trainer.Config) -> Trainer.Config:
    """What gloo and torch.cpu do not have is replaced by what they have."""
    spec = config.model_spec
    # FlexAttention has no backward on CPUs.
    for _, _, parent, name in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    spec.parallelize_fn = with_sums(spec.parallelize_fn)
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    return config


def on_cpu(config: Trainer.Config) -> Trainer.Config:
    """For CPUs, short, and the same on every run."""
    del config.model_spec.model.layers[LAYERS:]
    for_cpus(config)
    config.parallelism.spmd_backend = "partial_dtensor"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 128, 5
    config.activation_checkpoint = None
    config.checkpoint.interval = 3
    config.checkpoint.last_save_model_only = False
    config.debug.seed = 0
    return config


class SequenceParallelAttention(Module):
    """Causal attention of this rank's part of the sequence to all of it, which torchtitan has for GPUs alone.

    ``spmd_types`` gathers keys and values; parts follow each other as ranks do, without a load balancer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, scale=None, enable_gqa=False, **others) -> torch.Tensor:
        """Of (batch, tokens, heads, features) each, whose names are those that torchtitan shards by."""
        queries, keys = q_BLNH.shape[1], k_BLNH.shape[1]
        first = current_spmd_mesh().get_local_rank("cp") * queries
        seen = first + torch.arange(queries)[:, None] >= torch.arange(keys)
        by_head = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        y = F.scaled_dot_product_attention(*by_head, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        return y.transpose(1, 2)


class AttentionWithSums(Module):
    """Causal attention that hands the logarithms of its sums on, as sinks ask for; torchtitan's is for GPUs alone."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, scale, out_transform, **others) -> torch.Tensor:
        """Of (batch, tokens, heads, features) each."""
        tokens, group = q_BLNH.shape[1], q_BLNH.shape[2] // k_BLNH.shape[2]
        k, v = (tensor.repeat_interleave(group, 2).transpose(1, 2) for tensor in (k_BLNH, v_BLNH))
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=k.device).triu(1)
        scores = (scale * q_BLNH.transpose(1, 2) @ k.mT).float().masked_fill(later, float("-inf"))
        sums = scores.logsumexp(-1)
        y = (scores - sums[..., None]).exp().to(v.dtype) @ v
        return out_transform(y.transpose(1, 2), sums.transpose(1, 2))


def with_sequence_parallel_attention(config: Trainer.Config) -> None:
    """For context parallelism, in place."""
    for _, _, parent, name in list(config.model_spec.model.traverse(ScaledDotProductAttention.Config)):
        setattr(parent, name, SequenceParallelAttention.Config())


def bf16() -> Trainer.Config:
    return on_cpu(llama3.llama3_debugmodel())


def chunked() -> Trainer.Config:
    """With the loss that torchtitan's configs have: computed in chunks, from the model's output projection."""
    stock = llama3.llama3_debugmodel()
    loss = stock.loss
    config = on_cpu(stock)
    config.loss = loss
    return config


def peer() -> Trainer.Config:
    """torchtitan's own converter, as it runs on CPUs: one scale a tensor, gathered in bf16."""
    config = llama3.llama3_debugmodel()
    converter = Float8LinearConverter.Config(emulate=True, filter_fqns=["lm_head"])
    config.model_spec = model_registry("debugmodel", converters=[converter])
    return on_cpu(config)


def f8sub(**options: Any) -> Trainer.Config:
    """The converter, by the backend that is fast on every CPU."""
    config = llama3.llama3_debugmodel()
    converter = titan.Float8Converter.Config(**{"emulate": True} | options)
    config.model_spec = model_registry("debugmodel", converters=[converter])
    return on_cpu(config)


def of_few_experts(config: Trainer.Config) -> Trainer.Config:
    """Eight experts of 64, of which a token has two."""
    for _, part, *_ in config.model_spec.model.traverse(Configurable.Config, recurse=True):
        if hasattr(part, "num_experts"):
            part.num_experts = 8
        if hasattr(part, "top_k"):
            part.top_k = 2
        if hasattr(part, "gate"):
            part.gate.out_features = 8
    return on_cpu(config)


def moe() -> Trainer.Config:
    """A mixture of experts."""
    return of_few_experts(qwen3.qwen3_moe_debug())


def f8sub_moe(**options: Any) -> Trainer.Config:
    config = qwen3.qwen3_moe_debug()
    converter = titan.Float8Converter.Config(**{"emulate": True} | options)
    config.model_spec = qwen3.model_registry("debugmodel_moe", converters=[converter])
    return of_few_experts(config)


def f8sub_gpt_oss(**options: Any) -> Trainer.Config:
    """Its experts multiply by a method, and have biases."""
    config = gpt_oss.gpt_oss_debugmodel()
    converter = titan.Float8Converter.Config(**{"emulate": True} | options)
    config.model_spec = gpt_oss.model_registry("debugmodel", converters=[converter])
    for _, _, parent, name in list(config.model_spec.model.traverse(VarlenAttention.Config)):
        setattr(parent, name, AttentionWithSums.Config())
    return of_few_experts(config)


def f8sub_chunked(**options: Any) -> Trainer.Config:
    config = chunked()
    titan.float8(config.model_spec.model, **{"emulate": True} | options)
    return config


def f8sub_hooked() -> Trainer.Config:
    """With scales, and all that is checked, from when the optimizers are built."""
    config = f8sub()
    config.model_spec = titan.with_precompute_scales(config.model_spec)
    return config


def f8sub_full_ac(**options: Any) -> Trainer.Config:
    config = f8sub(**options)
    config.activation_checkpoint = FullAC.Config()
    return config


def f8sub_selective_ac(**options: Any) -> Trainer.Config:
    config = f8sub(**options)
    config.activation_checkpoint = SelectiveAC.Config()
    return config


def f8sub_moe_selective_ac(**options: Any) -> Trainer.Config:
    config = f8sub_moe(**options)
    config.activation_checkpoint = SelectiveAC.Config()
    return config


def configured(arguments: list[str], folder: Path) -> Any:
    """A config of this module, with options as of the command line, which takes seconds to parse.

    They are the config's name and, after a colon, its arguments; then ``section.field=value``. Values are JSON.
    """
    (name, _, given), *options = arguments[0].partition(":"), *arguments[1:]
    config = globals()[name](**json.loads(given or "{}"))
    config.hf_assets_path, config.dataloader.dataset_path = str(folder / "tokenizer"), str(folder / "data")
    config.dump_folder = str(folder)
    for option in options:
        path, _, value = option.partition("=")
        *sections, field = path.split(".")
        section = functools.reduce(getattr, sections, config)
        getattr(section, field)  # of that name
        setattr(section, field, json.loads(value))
    if config.parallelism.context_parallel_degree > 1:
        with_sequence_parallel_attention(config)
    return config
