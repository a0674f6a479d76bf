"""Gradients as float8 on FSDP2's wire, at one byte per element, summed in float32."""
