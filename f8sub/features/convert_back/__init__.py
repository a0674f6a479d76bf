"""Converted models back to plain ones: ``convert_from_float8``."""
