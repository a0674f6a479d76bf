"""Checkpoints in float8: what inference engines load, written, read and streamed."""
