"""f8sub in place of torchao under axolotl's ``fp8: true``, by one entry of its YAML file.

plugins: [f8sub.integrations.axolotl.Float8Plugin]
"""

import warnings
from collections.abc import Mapping
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

import f8sub
from f8sub.integrations.one_line import HIGH_PRECISION
from f8sub.integrations.torchao import TakenOver, take_over
from f8sub.integrations.transformers import Float8Callback

__all__ = ["Float8Args", "Float8Plugin"]


class Float8Args(BaseModel):
    """The plugin's own entries of axolotl's YAML file.

    Attributes:
        f8sub_attention: ``attention`` of ``f8sub.integrations.torchao.take_over``. axolotl's own float8 attention,
            ``attn_implementation: fp8``, is another one.
    """

    f8sub_attention: str = HIGH_PRECISION


class Float8Plugin(BasePlugin):
    """Calls ``f8sub.integrations.torchao.take_over`` before axolotl loads a model.

    ``fp8_config`` and ``fp8_enable_fsdp_float8_all_gather`` keep their meaning. axolotl leaves the first and the last
    linear layer and routers in high precision, and refuses a file with ``fp8`` on a machine without float8 units.
    ``f8sub_attention: float8`` has the model attend in float8, too; then ``Float8Callback`` keeps what attention
    remembers, so that a resumed run is bitwise the same.
    """

    _taken: TakenOver | None = None

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Take torchao's place, if ``cfg`` has ``fp8``; axolotl calls this with the file as it was read.

        Raises:
            Float8ConfigError: no such ``f8sub_attention``.

        Warns:
            Float8Warning: ``cfg`` has no ``fp8``, so that nothing will be in float8.
        """
        if cfg.get("fp8"):
            self._taken = take_over(attention=_attention_of(cfg))
        else:
            warnings.warn(
                "Float8Plugin found no fp8: true in axolotl's config, so nothing will be in float8; add fp8: true, "
                "or remove the plugin",
                f8sub.Float8Warning,
                stacklevel=2,
            )

    def get_input_args(self) -> str:
        """Return the name of the class of the plugin's own entries."""
        return f"{__name__}.{Float8Args.__name__}"

    def add_callbacks_post_trainer(self, cfg: Mapping[str, Any], trainer: Any) -> list[Any]:
        """Return the callback that keeps what attention in float8 remembers, where there is such attention."""
        return [Float8Callback()] if cfg.get("fp8") and _attention_of(cfg) != HIGH_PRECISION else []

    def on_config_validation_error(self, cfg: Mapping[str, Any]) -> None:
        """Give torchao's functions back, because axolotl refused ``cfg``."""
        if self._taken is not None:
            self._taken.give_back()


def _attention_of(cfg: Mapping[str, Any]) -> str:
    # axolotl's dictionaries have None for what the file leaves out.
    return cfg.get("f8sub_attention") or HIGH_PRECISION
