"""What is checked of weights when they were sharded: that the ranks agree, and that FSDP2 can gather float8."""
