"""Float8 for torchtitan, from outside.

torchtitan 0.3: a flag of its command line, for any model, without a line of code::

    --override.imports 'f8sub.titan.float8={"recipe_name": "tensorwise"}' f8sub.titan.precompute_scales

In code, ``model_registry(flavor, converters=[Float8Converter.Config(...)])``, or ``with_float8(model_spec, ...)`` for a
spec that is there already. Configs: ``--module f8sub.titan --config llama3_8b_f8sub``.

torchtitan after 0.3: ``--override 'f8sub.titan.float8={"recipe_name": "tensorwise"}'``; in code,
``apply_transforms(config, [Float8Transform(...)])`` or ``with_float8(config, ...)``.

torchtitan 0.2: ``--job.custom_config_module=f8sub.titan --model.converters=f8sub``, or the same in a job's TOML, and
options in its section ``[f8sub]`` or on the command line, ``--f8sub.recipe_name=rowwise``.

A name that is for another torchtitan than the installed one is a ``Float8ConfigError``, which says what to take.
"""

from typing import TYPE_CHECKING, Any

from f8sub.integrations.torchtitan import layout

if TYPE_CHECKING:
    from f8sub.integrations.torchtitan.configs import *  # noqa: F403  (by the names of torchtitan's configs)
    from f8sub.integrations.torchtitan.converter import Float8Converter as Float8Converter
    from f8sub.integrations.torchtitan.converter import with_float8 as with_float8
    from f8sub.integrations.torchtitan.converter import with_precompute_scales as with_precompute_scales
    from f8sub.integrations.torchtitan.overrides import float8 as float8
    from f8sub.integrations.torchtitan.overrides import precompute_scales as precompute_scales
    from f8sub.integrations.torchtitan.torchtitan_0_2 import Float8ModelConverter as Float8ModelConverter
    from f8sub.integrations.torchtitan.torchtitan_0_2 import JobConfig as JobConfig
    from f8sub.integrations.torchtitan.transform import Float8Transform as Float8Transform


def __getattr__(name: str) -> Any:
    return layout.attribute(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *layout.names()})


layout.register()
