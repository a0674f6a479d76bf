"""What float8 does to one operand: statistics of a matrix and its codes, and what to do about them."""
