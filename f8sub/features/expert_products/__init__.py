"""What multiplies experts' operands: backends of grouped products, and the plan that binds a recipe to them."""
