"""Seconds of the grouped products of experts, and whether float8 makes them faster."""
