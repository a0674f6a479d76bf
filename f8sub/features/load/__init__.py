"""Reading checkpoints: float8 ones into masters, finished ones into float8."""
