"""Float8Tensors in users' own code: ``f8sub.quantize`` makes them, and torch's operators take them."""
