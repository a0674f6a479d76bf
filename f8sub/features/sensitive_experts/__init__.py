"""Experts in what `sensitivity` looks at."""
