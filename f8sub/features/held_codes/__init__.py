"""Codes of a checkpoint in the place of frozen weights, without values in high precision."""
