"""Weights that are their float8 codes, with high-precision masters in the optimizer."""
