"""A hook that calls `precompute_scales` after every step of an optimizer."""
