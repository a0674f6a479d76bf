"""Tools for any model: bytes, steps with gradients that are not finite, the first NaN, kernels of attention."""
