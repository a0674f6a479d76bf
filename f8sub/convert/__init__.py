"""nn.Linear to Float8Linear and back: which layers, with which recipe, and the report of it."""
