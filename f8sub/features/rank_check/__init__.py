"""Ranks that were converted differently: an error on every rank, before anything can hang."""
