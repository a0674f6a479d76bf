"""Raw tensors in, raw tensors out: quantizers and GEMMs, one file a backend."""
