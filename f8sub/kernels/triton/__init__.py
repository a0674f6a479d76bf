"""Quantizers for CUDA in Triton, bitwise equal to the reference.

``casts.py`` and ``blocks.py`` are the kernels, ``tiles.py`` what they share, ``launch.py`` decides which of them run
over what. Nothing here is imported before it is needed: triton comes with torch for CUDA alone.
"""
