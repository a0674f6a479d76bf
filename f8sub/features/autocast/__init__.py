"""Recipe contexts: another recipe, or none, for the forwards inside them."""
