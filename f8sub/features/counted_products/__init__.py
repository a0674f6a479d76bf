"""What a model multiplies by, counted in one forward of a copy that has no side effects."""
