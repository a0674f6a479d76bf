"""What float8 would gain of a model, before anything runs: time and bytes on the wire, by shapes alone."""
