"""Float8 for torchtitan, from outside.

torchtitan 0.3: a flag of its command line, for any model, without a line of code::

    --override.imports 'f8sub.titan.float8={"recipe_name": "tensorwise"}' f8sub.titan.precompute_scales

In code, ``model_registry(flavor, converters=[Float8Converter.Config(...)])``, or ``with_float8(model_spec, ...)`` for a
spec that is there already. Ready-made, ``--module f8sub.titan --config llama3_8b_f8sub``.

torchtitan 0.2: ``--job.custom_config_module=f8sub.titan --model.converters=f8sub``, or the same in a job's TOML, and
options in its section ``[f8sub]`` or on the command line, ``--f8sub.recipe_name=rowwise``.
"""

from importlib.util import find_spec
from typing import Any

if find_spec("torchtitan.protocols.model_converter"):  # 0.2
    from f8sub.features.torchtitan.job_config import Float8ModelConverter, JobConfig

    __all__ = ["Float8ModelConverter", "JobConfig"]
else:
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.override import override
    from torchtitan.protocols.model import BaseModel

    from f8sub.features.torchtitan.configs import (
        deepseek_v3_16b_f8sub,
        deepseek_v3_671b_f8sub,
        deepseek_v3_debugmodel_f8sub,
        llama3_8b_f8sub,
        llama3_70b_f8sub,
        llama3_405b_f8sub,
        llama3_debugmodel_f8sub,
        qwen3_0_6b_f8sub,
        qwen3_14b_f8sub,
        qwen3_30b_a3b_f8sub,
        qwen3_32b_f8sub,
        qwen3_debugmodel_f8sub,
        qwen3_moe_debug_f8sub,
    )
    from f8sub.features.torchtitan.converter import (
        Float8Converter,
        precompute_when_built,
        with_float8,
        with_precompute_scales,
    )

    __all__ = [
        "Float8Converter",
        "deepseek_v3_16b_f8sub",
        "deepseek_v3_671b_f8sub",
        "deepseek_v3_debugmodel_f8sub",
        "float8",
        "llama3_8b_f8sub",
        "llama3_70b_f8sub",
        "llama3_405b_f8sub",
        "llama3_debugmodel_f8sub",
        "precompute_scales",
        "qwen3_0_6b_f8sub",
        "qwen3_14b_f8sub",
        "qwen3_30b_a3b_f8sub",
        "qwen3_32b_f8sub",
        "qwen3_debugmodel_f8sub",
        "qwen3_moe_debug_f8sub",
        "with_float8",
        "with_precompute_scales",
    ]

    @override(target=BaseModel.Config, description="f8sub: linear layers in float8")
    def float8(config: BaseModel.Config, **options: Any) -> BaseModel.Config:
        """The override that converts a model; ``options`` are those of ``Float8Converter.Config``."""
        return Float8Converter(Float8Converter.Config(**options)).convert(config)

    @override(target=OptimizersContainer.Config, description="f8sub: scales after each step")
    def precompute_scales(config: OptimizersContainer.Config) -> OptimizersContainer.Config:
        """The override with which scales are made, and converted weights checked, from when the optimizers are built.

        Without it weights are checked at the first forward, and scales are made from the first optimizer step on.
        """
        precompute_when_built(config)
        return config
