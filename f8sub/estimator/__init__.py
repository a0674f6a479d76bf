"""Predicts from shapes what float8 would gain: seconds, bytes on the wire, memory."""
