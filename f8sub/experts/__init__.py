"""Mixtures of experts in float8: grouped products over 3-D weights, adapters over them, token dispatch."""
