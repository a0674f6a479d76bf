"""Optimizers for weights that the model holds in fewer bits than they are trained in."""

from f8sub.features.primary_weights.optim import MasterWeights as MasterWeights
