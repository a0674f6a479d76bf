"""Examples of the pages that need ranks."""
