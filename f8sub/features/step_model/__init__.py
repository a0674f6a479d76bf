"""How long a step of FSDP2 takes on 8 to 1024 GPUs, and what float8 adds to it part by part."""
