"""Delayed scaling: scales of the amaxes of earlier steps."""
