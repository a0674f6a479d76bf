"""A loss that a user's function made, before backward starts from it."""

import torch

from f8sub.errors import Float8ConfigError


def checked_loss(loss: object) -> torch.Tensor:
    """The loss as it is.

    Raises:
        Float8ConfigError: it is no tensor of one element, or has no gradient.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        is_what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise Float8ConfigError(f"loss_of returns a loss, a tensor of one element, and returned {is_what}")
    if not loss.requires_grad:
        raise Float8ConfigError(
            "the loss has no gradient: no parameter learns, or loss_of detaches it or runs under torch.no_grad"
        )
    return loss
