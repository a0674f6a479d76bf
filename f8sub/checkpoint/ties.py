"""Names of tensors that a model has under several: checkpoints hold all of them, or any one."""

import torch

from f8sub.checkpoint.names import without_wrappers


def other_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """The other names of each tied parameter or buffer, by the first one."""
    names: dict[torch.Tensor, list[str]] = {}
    for found in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in found:
            names.setdefault(tensor, []).append(without_wrappers(name))
    return {first: others for first, *others in names.values() if others}
