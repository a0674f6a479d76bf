"""Float8 for torchtitan: what ``--override.imports`` and ``--module`` name; see ``f8sub.features.torchtitan.entry``."""

from f8sub.features.torchtitan.entry import *  # noqa: F403
from f8sub.features.torchtitan.entry import __all__ as __all__
