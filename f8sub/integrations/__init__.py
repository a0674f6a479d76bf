"""Layer 7. f8sub inside of other projects' trainers; nothing here is imported before it is asked for."""
