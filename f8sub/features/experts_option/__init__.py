"""The options ``experts`` and ``tokens`` of a conversion, and of what looks at one."""
