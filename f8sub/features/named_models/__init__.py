"""Models that the command line names: a folder, a type of transformers, a config of torchtitan, a function."""
