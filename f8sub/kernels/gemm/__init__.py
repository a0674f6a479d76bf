"""GEMMs of float8 operands: one file a backend, and which one is taken for a shape."""
