"""Mixtures of experts in float8: grouped products over 3-D weights, each expert as a Float8Linear of its own."""
