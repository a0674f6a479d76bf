"""What a forward that begins now would multiply by, for features that look at one."""
