"""Which classes of linear layers are converted, with all that they add: nn.Linear and its subclasses."""
