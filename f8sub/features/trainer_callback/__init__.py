"""Scales after each step of the Trainer of transformers."""
