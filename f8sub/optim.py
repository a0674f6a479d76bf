"""Optimizers for weights that the model holds in fewer bits than they are trained in."""

from f8sub.features.master_weights.optim import MasterWeights as MasterWeights
