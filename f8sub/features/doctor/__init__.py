"""The command ``doctor``: what of f8sub works on this machine, proved by running it."""
