"""Attention: its arithmetic in float8, cuDNN's kernels for it, and which of torch's kernels come first on Hopper."""

from f8sub.attention.kernel_order import prefer_cudnn_attention as prefer_cudnn_attention
