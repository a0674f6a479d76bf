import copy
from typing import Any

from torchtitan.config.transform.base import ModelConfigTransform, ModelConfigTransformContext


def apply_transforms(
    config: Any,
    transforms: list[ModelConfigTransform],
    *,
    context: ModelConfigTransformContext | None = None,
    relations: Any = None,
) -> Any:
    """A copy of a trainer's config whose model the transforms rewrote."""
    config = copy.deepcopy(config)
    context = context or ModelConfigTransformContext(training=config.training, parallelism=config.parallelism)
    for transform in transforms:
        config.model = transform.transform(config.model, context=context)
    config.__post_init__()
    return config
