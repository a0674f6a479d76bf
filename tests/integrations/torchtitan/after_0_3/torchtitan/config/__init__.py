from torchtitan.config.configs import TrainingConfig
from torchtitan.config.configurable import Configurable
from torchtitan.config.override import OverrideConfig, override
from torchtitan.config.parallelism import ParallelismConfig

__all__ = ["Configurable", "OverrideConfig", "ParallelismConfig", "TrainingConfig", "override"]
