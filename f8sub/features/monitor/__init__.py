"""Monitor: what float8 does to each layer, measured in one step of every N."""
