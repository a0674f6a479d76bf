"""Bytes at the peak of a training step, of adapters over a frozen base too, by shapes alone."""
