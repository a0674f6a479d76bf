"""A quantizer for eager code on CPUs, whose scales are made on the host."""
