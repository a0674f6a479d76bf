"""From a finished checkpoint to a float8 one, without a GPU, in Python and as a command."""
