"""Parameters: one in the place of another, and as a state dict holds them."""

from typing import Any

import torch

from f8sub.weights.weight import Weight, local_tensor


def take_place(new: torch.nn.Parameter, old: torch.Tensor) -> bool:
    """Make the Python object ``old`` be what ``new`` is, so that whatever holds ``old`` holds the new weight.

    ``new`` gets gradient, hooks and users' attributes in any case.

    Returns:
        False where torch cannot swap the two, because a weak reference or an autograd graph refers to ``old``; the
        caller then has to replace the reference itself.
    """
    new.grad = old.grad
    new._backward_hooks = old._backward_hooks
    new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    own: Any = getattr(type(old), "OWN_ATTRIBUTES", ())
    for name, value in vars(old).items():
        if name not in own:
            setattr(new, name, value)
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:
        return False
    return True


def exported(weight: torch.Tensor) -> torch.Tensor:
    """A weight, or an optimizer's master of one, as a state dict holds it: in the same memory, without a graph."""
    local = local_tensor(weight)
    return local.exported_as(weight) if isinstance(local, Weight) else weight.detach()
