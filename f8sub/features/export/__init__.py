"""Checkpoints and streams of a model's own float8 codes, in the formats that inference engines load."""
