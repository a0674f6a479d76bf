"""Grouped products of experts: operands, quantizers, backends."""
