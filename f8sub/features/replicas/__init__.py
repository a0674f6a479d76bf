"""DistributedDataParallel: what replicas of a layer share besides their gradients."""
