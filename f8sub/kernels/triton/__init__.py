"""Quantizers for CUDA in Triton, bitwise equal to the reference, and GEMMs of operands with scales of blocks.

Files that end in ``launch`` decide which kernels run over what. Kernels are imported when they are needed: triton comes
with torch for CUDA alone.
"""
