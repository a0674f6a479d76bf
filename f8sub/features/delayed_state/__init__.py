"""What delayed scaling keeps of a weight and its products: amax histories and scales, and how they roll."""
