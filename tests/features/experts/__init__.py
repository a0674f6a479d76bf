"""Experts in float8, each judged by the Float8Linear that it would be on its own tokens."""
