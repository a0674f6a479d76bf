"""Layer 0. One file is one recipe: its name is the file's, its value the attribute ``RECIPE``."""

DEFAULT = "tensorwise"
"""The recipe a user gets who names none: the fastest of the field's, with one scale a tensor."""
