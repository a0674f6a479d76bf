"""Models of transformers with frozen float8 experts and PEFT's adapters over their weights."""

from typing import Any

import peft
import torch
from torch import nn

import f8sub
from tests.data_sets import gaussian, generator
from tests.experts.models import of_transformers

IDS = torch.randint(1, 64, (2, 12), generator=generator(1))
RANK = 4


def config(**options: Any) -> peft.LoraConfig:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return peft.LoraConfig(r=RANK, target_modules=[], target_parameters=targets, **options)


def fill(model: nn.Module, size: float = 0.1) -> None:
    """Adapters that do something, the same every time."""
    rng = generator(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(size * gaussian(tuple(parameter.shape), rng))


def adapted(
    kind: str,
    recipe: str = "rowwise",
    *,
    after: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Any:
    """The model with adapters; ``after`` converts it last."""
    model: Any = of_transformers(kind)
    if dtype != torch.bfloat16:
        model = model.to(dtype)

    def convert(model: nn.Module) -> None:
        given = {"experts": True, "backend": "reference", **options}
        f8sub.convert_to_float8(model, recipe, **given)

    if not after:
        convert(model)
    model.requires_grad_(False)
    if not after:
        return with_adapters(model)
    model = with_adapters(model)
    convert(model)
    return model


def with_adapters(model: nn.Module) -> Any:
    made = peft.get_peft_model(model, config(), autocast_adapter_dtype=False)
    fill(made)
    return made


def loss_and_gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def loss_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        loss: torch.Tensor = model(input_ids=IDS, labels=IDS).loss
        return loss
