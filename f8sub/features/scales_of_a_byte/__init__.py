"""Products with scales of one byte, as Blackwell's tensor cores take them: MXFP8's and NVFP4's."""
