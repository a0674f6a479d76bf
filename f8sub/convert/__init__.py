"""nn.Linear to Float8Linear: which layers, with which recipe."""
