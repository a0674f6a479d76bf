"""Calls that were written for other libraries: errors that show the same call of f8sub."""
