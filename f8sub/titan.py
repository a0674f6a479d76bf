"""Float8 for torchtitan, from outside.

torchtitan 0.3: a flag of its command line, for any model, without a line of code::

    --override.imports 'f8sub.titan.float8={"recipe_name": "tensorwise"}' f8sub.titan.precompute_scales

In code, ``model_registry(flavor, converters=[Float8Converter.Config(...)])``, or ``with_float8(model_spec, ...)`` for a
spec that is there already. Ready-made, ``--module f8sub.titan --config llama3_8b_f8sub``.

torchtitan 0.2: ``--job.custom_config_module=f8sub.titan --model.converters=f8sub``, or the same in a job's TOML, and
options in its section ``[f8sub]`` or on the command line, ``--f8sub.recipe_name=rowwise``.
"""

from importlib.util import find_spec

if find_spec("torchtitan.protocols.model_converter"):  # 0.2
    from f8sub.features.torchtitan.job_config import Float8ModelConverter, JobConfig

    __all__ = ["Float8ModelConverter", "JobConfig"]
else:
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
        float8,
        precompute_scales,
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
