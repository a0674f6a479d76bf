"""Activation checkpointing: ``checkpoint_policy``, and float8 as a policy sees it."""
