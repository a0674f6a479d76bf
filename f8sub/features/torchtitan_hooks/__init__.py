"""What torchtitan is not told: set up when a converted model is first called, or its optimizer first steps."""
