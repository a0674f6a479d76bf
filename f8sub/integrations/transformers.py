"""For the Trainer of transformers."""

from f8sub.features.trainer_callback.callback import Float8Callback as Float8Callback
