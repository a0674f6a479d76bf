"""Checkpoints in float8, written, read and streamed as inference engines load them."""
