"""The version, which the ranks of a job compare."""

__version__ = "0.2.0"
