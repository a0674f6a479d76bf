"""Sensitivity: which layers float8 hurts most, from one forward and backward."""
