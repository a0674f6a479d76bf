"""Modules that other libraries call; each needs the library of its name."""
