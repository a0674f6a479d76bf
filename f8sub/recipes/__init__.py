"""One file is one recipe and names it. ``recipe(**options)`` makes it, ``RECIPE`` is the default one."""

DEFAULT = "tensorwise"
"""The recipe a user gets who names none: the fastest of the field's, with one scale a tensor."""
