"""Experts on gloo ranks."""
