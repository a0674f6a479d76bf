"""What float8 does to a model, measured or reported: Monitor, sensitivity, compare, reports, doctor."""
