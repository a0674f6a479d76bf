"""The command line: ``python -m f8sub COMMAND``."""
