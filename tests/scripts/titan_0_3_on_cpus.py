"""``scripts/bench/titan_0_3.py`` on CPUs and gloo: ``torchrun -m tests.scripts.titan_0_3_on_cpus`` with its options."""

from typing import Any

from tests.integrations.torchtitan import cpu  # noqa: F401  (what torchtitan believes the device to be)

# isort: split
import torch

from scripts.bench import titan_0_3
from tests.integrations.torchtitan import configs

for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
    setattr(torch.accelerator, name, lambda: None)
torch.accelerator.memory_stats, torch.accelerator.max_memory_reserved = dict, int
of_gpus = titan_0_3.config_of


def config_of(*given: Any) -> Any:
    """The config of an arm, of fewer layers and experts."""
    config = of_gpus(*given)
    training, checkpoints = config.training, config.activation_checkpoint
    asked = training.local_batch_size, training.seq_len, training.steps
    (configs.of_few_experts if given[1].model == "qwen3" else configs.on_cpu)(config)
    training.local_batch_size, training.seq_len, training.steps = asked
    config.activation_checkpoint = checkpoints
    return config


titan_0_3.config_of = config_of

if __name__ == "__main__":
    titan_0_3.main()
