"""Delayed scaling: scales computed from the amaxes of earlier steps."""
