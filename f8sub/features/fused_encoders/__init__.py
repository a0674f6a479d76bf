"""torch's fused inference of ``nn.TransformerEncoder``, which reads weights itself: off where layers were converted."""
