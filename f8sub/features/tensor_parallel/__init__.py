"""Tensor parallelism: one layer's GEMMs over ranks that have a part of its weight each."""
