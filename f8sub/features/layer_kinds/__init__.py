"""Names that stand for several layers of a stack of equal blocks."""
