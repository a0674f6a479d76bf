"""Training configs that run on CPUs: ``--module tests.titan.configs --config bf16``."""

from typing import Any

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from f8sub import titan
from tests.titan.gloo import with_sums

LAYERS = 2
"""Of the debug model's six."""


def on_cpu(config: Trainer.Config) -> Trainer.Config:
    """What gloo and torch.cpu do not have is replaced by what they have; short, and the same on every run."""
    spec = config.model_spec
    del spec.model.layers[LAYERS:]
    # FlexAttention has no backward on CPUs.
    for _, _, parent, name in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    spec.parallelize_fn = with_sums(spec.parallelize_fn)
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    config.parallelism.spmd_backend = "partial_dtensor"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 128, 5
    config.training.disable_cuda_graphs = True
    config.activation_checkpoint = None
    config.validator.enable = False
    config.checkpoint.interval = 3
    config.checkpoint.last_save_model_only = False
    config.debug.seed = 0
    return config


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
    converter = titan.Float8Converter.Config(emulate=True, **options)
    config.model_spec = model_registry("debugmodel", converters=[converter])
    return on_cpu(config)


def f8sub_chunked(**options: Any) -> Trainer.Config:
    config = chunked()
    titan.float8(config.model_spec.model, emulate=True, **options)
    return config


def f8sub_hooked() -> Trainer.Config:
    """With scales, and all that is checked, from when the optimizers are built."""
    config = f8sub()
    config.model_spec = titan.with_precompute_scales(config.model_spec)
    return config


def f8sub_full_ac() -> Trainer.Config:
    config = f8sub()
    config.activation_checkpoint = FullAC.Config()
    return config


def f8sub_selective_ac() -> Trainer.Config:
    config = f8sub()
    config.activation_checkpoint = SelectiveAC.Config()
    return config
