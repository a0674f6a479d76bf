"""Experts in what `find_nonfinite` searches."""
