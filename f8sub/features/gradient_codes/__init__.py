"""Gradients as bytes for each rank, and received bytes as their sum; knows tensors alone."""
