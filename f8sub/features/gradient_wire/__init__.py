"""Gradients at one byte an element on FSDP2's wire, added in float32."""
