"""Rows of a ``Monitor`` for the products of experts."""
