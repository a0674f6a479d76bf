"""Tokens of experts at one byte an element between expert-parallel ranks."""
