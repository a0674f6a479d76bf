"""Flows 2 and 3: a shard to the wire and back, and an optimizer step to scales; knows weights, and no layers."""
