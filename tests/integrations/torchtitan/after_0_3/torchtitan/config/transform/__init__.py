from torchtitan.config.transform.apply import apply_transforms
from torchtitan.config.transform.base import ModelConfigTransform, ModelConfigTransformContext

__all__ = ["ModelConfigTransform", "ModelConfigTransformContext", "apply_transforms"]
