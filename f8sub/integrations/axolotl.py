"""f8sub in place of torchao under axolotl's ``fp8: true``, by one entry of its YAML file.

plugins: [f8sub.integrations.axolotl.Float8Plugin]
"""

import warnings
from collections.abc import Mapping
from typing import Any

from axolotl.integrations.base import BasePlugin

import f8sub
from f8sub.integrations.torchao import TakenOver, take_over

__all__ = ["Float8Plugin"]


class Float8Plugin(BasePlugin):
    """Calls ``f8sub.integrations.torchao.take_over`` before axolotl loads a model.

    ``fp8_config`` and ``fp8_enable_fsdp_float8_all_gather`` keep their meaning. axolotl leaves the first and the last
    linear layer and routers in high precision, and refuses a file with ``fp8`` on a machine without float8 units.
    """

    _taken: TakenOver | None = None

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Take torchao's place, if ``cfg`` has ``fp8``; axolotl calls this with the file as it was read.

        Warns:
            Float8Warning: ``cfg`` has no ``fp8``, so that nothing will be in float8.
        """
        if cfg.get("fp8"):
            self._taken = take_over()
        else:
            warnings.warn(
                "Float8Plugin found no fp8: true in axolotl's config, so nothing will be in float8; add fp8: true, "
                "or remove the plugin",
                f8sub.Float8Warning,
                stacklevel=2,
            )

    def on_config_validation_error(self, cfg: Mapping[str, Any]) -> None:
        """Give torchao's functions back, because axolotl refused ``cfg``."""
        if self._taken is not None:
            self._taken.give_back()
