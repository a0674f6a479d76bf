"""Activation checkpointing: ``checkpoint_policy``."""
