"""The recipe `delayed`: TransformerEngine's parameters of delayed scaling, and what they mean here."""
