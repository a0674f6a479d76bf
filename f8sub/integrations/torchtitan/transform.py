"""torchtitan after 0.3: the transform of a model's config, and configs of trainers whose models are in float8."""

from dataclasses import dataclass
from typing import Any

from torchtitan.config.transform import ModelConfigTransform, apply_transforms
from torchtitan.protocols.model import BaseModel

from f8sub.integrations.torchtitan.built import in_float8
from f8sub.integrations.torchtitan.options import NOT_KNOWN, Options, known, tokens_of

__all__ = ["Float8Transform", "with_float8"]


@dataclass(frozen=True, kw_only=True)
class Float8Transform(Options, ModelConfigTransform):
    """Convert a model's linear layers to float8: ``apply_transforms(config, [Float8Transform()])``.

    It is of torchtitan after 0.3; its fields are the options of ``Float8Converter.Config``. The layers are converted
    when the model is built, all together, by ``f8sub.convert_to_float8``, and their scales are computed after each
    optimizer step. The config tree stays as it is, so this goes before other transforms or after them.

    Stacked projections, whose weight has three dimensions, such as ``w13`` of torchtitan's feed-forward, stay in high
    precision, and so do layers whose class multiplies in a way of its own, such as LoRA's.
    """

    def transform(self, model: BaseModel.Config, *, context: Any = None) -> BaseModel.Config:
        """Have ``model`` build its model in float8, in place; one that does so already takes the new options."""
        known = context is not None and hasattr(context, "training")
        return in_float8(
            model, self, tokens_of(context.training, context.parallelism) if known else NOT_KNOWN
        )


def with_float8(config: Any, **options: Any) -> Any:
    """Return a trainer's or a model's config with its model in float8, and scales after each optimizer step.

    Args:
        config: a trainer's, as torchtitan's recipes return it, which is copied; or a model's, which is changed.
        options: those of ``Float8Transform``.
    """
    transform = Float8Transform(**known(options))
    if isinstance(config, BaseModel.Config):
        return transform.transform(config)
    return apply_transforms(config, [transform])
