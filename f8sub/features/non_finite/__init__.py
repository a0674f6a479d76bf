"""NaN and infinity in weights that no exchange covers."""
