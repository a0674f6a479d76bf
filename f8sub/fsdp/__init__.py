"""Layer 5. Weights that cross the wire as float8: the all-gather hooks, the amax table, precompute_scales."""
