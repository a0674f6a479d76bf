"""A training step as a CUDA graph."""
