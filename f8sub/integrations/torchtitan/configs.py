"""torchtitan 0.3's own training configs, in float8: ``--module f8sub.titan --config llama3_8b_f8sub``."""

import functools
from collections.abc import Callable

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig
from torchtitan.models.deepseek_v3 import config_registry as deepseek_v3
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.models.llama3 import model_registry
from torchtitan.models.qwen3 import config_registry as qwen3
from torchtitan.trainer import Trainer

from f8sub.integrations.torchtitan.converter import with_float8

__all__ = [
    "deepseek_v3_16b_f8sub",
    "deepseek_v3_671b_f8sub",
    "deepseek_v3_debugmodel_f8sub",
    "llama3_8b_f8sub",
    "llama3_70b_f8sub",
    "llama3_405b_f8sub",
    "llama3_debugmodel_f8sub",
    "qwen3_0_6b_f8sub",
    "qwen3_14b_f8sub",
    "qwen3_30b_a3b_f8sub",
    "qwen3_32b_f8sub",
    "qwen3_debugmodel_f8sub",
    "qwen3_moe_debug_f8sub",
]

ConfigFunction = Callable[[], Trainer.Config]


def _in_float8(stock: ConfigFunction) -> ConfigFunction:
    """Return ``stock`` with all that the converter converts in float8, default recipe, and nothing else changed."""

    @functools.wraps(stock)
    def config() -> Trainer.Config:
        made = stock()
        made.model_spec = with_float8(made.model_spec)
        return made

    config.__name__ = config.__qualname__ = f"{stock.__name__}_f8sub"
    return config


def _compiled(stock: ConfigFunction) -> ConfigFunction:
    """Return ``stock`` under torch.compile, without which float8 is slower than bf16 on a GPU."""

    @functools.wraps(stock)
    def config() -> Trainer.Config:
        made = stock()
        made.compile = CompileConfig(enable=True, components=["model"])
        return made

    return config


def _llama3_405b() -> Trainer.Config:
    """Return torchtitan's 405B, built from its 70B: its own has torchao's float8 already, and is for GPUs alone."""
    made = llama3.llama3_70b()
    made.model_spec = model_registry("405B")
    made.hf_assets_path = "./assets/hf/Llama-3.1-405B"
    made.optimizer = default_adamw(lr=8e-5)
    made.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=600)
    made.training.local_batch_size, made.training.steps = 2, 3000
    made.compile = CompileConfig(enable=True, enable_async_tensor_parallel=True)
    return made


_llama3_405b.__name__ = "llama3_405b"

llama3_debugmodel_f8sub = _in_float8(llama3.llama3_debugmodel)
llama3_8b_f8sub = _in_float8(_compiled(llama3.llama3_8b))
llama3_70b_f8sub = _in_float8(_compiled(llama3.llama3_70b))
llama3_405b_f8sub = _in_float8(_llama3_405b)

qwen3_debugmodel_f8sub = _in_float8(qwen3.qwen3_debugmodel)
qwen3_moe_debug_f8sub = _in_float8(qwen3.qwen3_moe_debug)
qwen3_0_6b_f8sub = _in_float8(_compiled(qwen3.qwen3_0_6b))
qwen3_14b_f8sub = _in_float8(_compiled(qwen3.qwen3_14b))
qwen3_32b_f8sub = _in_float8(_compiled(qwen3.qwen3_32b))
qwen3_30b_a3b_f8sub = _in_float8(qwen3.qwen3_30b_a3b)

deepseek_v3_debugmodel_f8sub = _in_float8(deepseek_v3.deepseek_v3_debugmodel)
deepseek_v3_16b_f8sub = _in_float8(deepseek_v3.deepseek_v3_16b)
deepseek_v3_671b_f8sub = _in_float8(deepseek_v3.deepseek_v3_671b)
