"""What the weights of experts take in bytes, as the account of linear layers tells it."""
