"""Reading checkpoints: float8 ones into frozen codes and masters."""
