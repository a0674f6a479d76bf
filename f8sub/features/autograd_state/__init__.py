"""What autograd does on this thread now."""
