"""What users run, on top; ``bench`` measures, ``tables`` makes the tables that the pages show."""
