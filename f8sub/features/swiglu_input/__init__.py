"""SwiGLU's gate and up at one byte an element."""
