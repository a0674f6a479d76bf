"""Flow 1: Float8Linear, and what it saves of x for backward."""
