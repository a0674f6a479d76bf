"""Measures and reports what float8 does to a model: Monitor, sensitivity, compare, reports, doctor."""
