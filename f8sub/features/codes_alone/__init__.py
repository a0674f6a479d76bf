"""Codes of sharded weights that have no high-precision values, kept or loaded."""
