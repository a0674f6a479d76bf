"""Checkpoints as Qwen3-FP8 and DeepSeek-V3 have them, made by torch's operators alone, and their values in float64."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from tests.data_sets import gaussian, generator

BLOCK = 128


def block_scales(w: torch.Tensor, power_of_2: bool) -> torch.Tensor:
    """The scale of each block of 128x128 that its codes are multiplied by."""
    rows, cols = (-(-size // BLOCK) for size in w.shape)
    filled = torch.zeros(rows * BLOCK, cols * BLOCK)
    filled[: w.shape[0], : w.shape[1]] = w
    amax = filled.unflatten(1, (cols, BLOCK)).unflatten(0, (rows, BLOCK)).abs().amax((1, 3))
    scale = (amax.double() / 448).float()
    return torch.exp2(scale.log2().ceil()) if power_of_2 else scale


def spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The scale of each element."""
    return scale.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]


def file_of(
    folder: Path, model: nn.Module, layers: list[str], *, power_of_2: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Write a file of random values for a model, these layers in float8; its tensors, and the values of its codes."""
    rng, tensors, values = generator(7), {}, {}
    for name, parameter in model.named_parameters():
        w = gaussian(tuple(parameter.shape), rng) * 0.05
        layer = name.removesuffix(".weight")
        if layer not in layers:
            tensors[name] = w
            continue
        scale = block_scales(w, power_of_2)
        codes = (w / spread(scale, w.shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors |= {name: codes, f"{layer}.weight_scale_inv": scale}
        values[layer] = codes.double() * spread(scale, w.shape).double()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return tensors, values
