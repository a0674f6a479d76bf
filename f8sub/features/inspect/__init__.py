"""The command ``inspect`` and ``f8sub.estimate``: what float8 would gain of a model, on one page."""
