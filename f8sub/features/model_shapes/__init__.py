"""What a model multiplies by, read off its modules: shapes, blocks, experts, and what would be converted."""
