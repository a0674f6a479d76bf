"""Operands of experts' products: tokens that lie in groups, one an expert, and weights of all experts."""
