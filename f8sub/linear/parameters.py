"""Parameters: one in the place of another, and as a state dict holds them."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.weight import Weight, WeightRecord, local_tensor


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


def make_master_again(record: WeightRecord) -> None:
    """Make a master weight of what ``load_state_dict(assign=True)`` put in its place."""
    weight = record.module._parameters[record.name]
    master = MasterWeight(local_tensor(weight).detach())
    master.cell.record = record
    if isinstance(weight, DTensor):
        weight._local_tensor = master
    else:
        master.cell.shared = True  # by the state dict
        setattr(record.module, record.name, torch.nn.Parameter(master, weight.requires_grad))


def exported(weight: torch.Tensor) -> torch.Tensor:
    """A weight, or an optimizer's master of one, as a state dict holds it: in the same memory, without a graph."""
    local = local_tensor(weight)
    return local.exported_as(weight) if isinstance(local, Weight) else weight.detach()
