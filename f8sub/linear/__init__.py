"""Flow 1: Float8Linear, what it saves of x for backward, and siblings that share an x."""
