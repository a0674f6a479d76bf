"""What float8 would gain of a model, before anything runs: time, memory and bytes on the wire, by shapes alone."""
