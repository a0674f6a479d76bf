"""torchtitan 0.3's command line on CPUs, with the debug model for Llama 3 of any size: for recipes/torchtitan.

torchrun -m tests.integrations.torchtitan.small --module f8sub.titan --config llama3_8b_f8sub ...
"""

from typing import Any

from tests.integrations.torchtitan import cpu  # first: it sets what the others read when they are imported

# isort: split
import torchtitan.train
from torchtitan.config import ConfigManager
from torchtitan.models.llama3 import config_registry, model_registry

from f8sub.integrations.torchtitan import configs
from tests.integrations.torchtitan.configs import for_cpus


def small(flavor: str, **options: Any) -> Any:
    """What ``model_registry`` has, in small, by the name that was asked for."""
    spec = model_registry("debugmodel", **options)
    spec.flavor = flavor
    return spec


class OnCpus(ConfigManager):
    """Options are parsed as they are; then what CPUs do not have is left out."""

    def parse_args(self, *args: Any) -> Any:
        return for_cpus(super().parse_args(*args))


config_registry.model_registry = configs.model_registry = small
torchtitan.train.ConfigManager = OnCpus

if __name__ == "__main__":
    cpu.torchtitan.train.main()
