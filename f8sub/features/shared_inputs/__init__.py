"""Siblings that share an x: q, k and v, or gate and up, quantize it once and save it once."""
