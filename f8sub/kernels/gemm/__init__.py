"""GEMMs of float8 operands: one file per backend, and the choice among them for a shape."""
