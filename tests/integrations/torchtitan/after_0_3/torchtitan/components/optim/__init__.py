from torchtitan.components.optim.optim import Optim
from torchtitan.components.optim.optimizer import AdamW, OptimizersContainer

__all__ = ["AdamW", "Optim", "OptimizersContainer"]
