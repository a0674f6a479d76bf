"""Quantizers for CUDA in Triton, bitwise equal to the reference.

``quantize_cuda.py`` and ``shard_amaxes.py`` are what the library calls. ``launch.py`` decides which kernels run over
what, ``casts.py`` and ``blocks.py`` are the kernels, ``tiles.py`` is what they share. Those are imported when they are
needed: triton comes with torch for CUDA alone.
"""
