"""Quantizers for CUDA in Triton, bitwise equal to the reference, and GEMMs of operands with scales of blocks.

The library calls ``quantize_cuda``, ``quantize_groups_cuda``, ``quantize_experts_cuda``, ``shard_amaxes``,
``triton_mm``, ``grouped_mm`` and ``measured``. ``launch``, ``grouped_launch``, ``expert_launch``, ``gemm_launch`` and
``grouped_gemm_launch`` decide which kernels run over what; the kernels are in ``casts``, ``grouped_casts``,
``in_turn``, ``pairs``, ``recasts``, ``tables``, ``gemm``, ``grouped_gemm``, ``hopper`` and ``grouped_hopper``, and
``tiles`` and ``strips`` are what they share. These are imported when they are needed: triton comes with torch for CUDA
alone.
"""
