"""What other libraries call: each module needs the library of its name."""
