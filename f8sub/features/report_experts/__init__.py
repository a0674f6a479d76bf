"""What a conversion report says of experts: what they gain by the formula, and how many tokens are enough."""
