"""In torchtitan, layers in its own float8, MXFP8 and NVFP4."""
