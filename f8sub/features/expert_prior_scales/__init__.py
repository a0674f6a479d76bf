"""Casts of experts' operands with scales that were made before: one an expert."""
