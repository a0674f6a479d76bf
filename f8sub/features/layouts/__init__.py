"""How inference engines name, shape and describe float8 weights on disk."""
