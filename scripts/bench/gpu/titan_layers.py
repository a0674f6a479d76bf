"""Llama 3 8B of fewer layers for torchtitan 0.2, by ``--experimental.custom_import=gpu.titan_layers``.

The flavors ``8B-1``, ``8B-2``, ``8B-4``, ``8B-8`` and ``8B-16`` are 8B with as many of its 32 layers.
"""

from __future__ import annotations

import dataclasses

from torchtitan.models.llama3 import llama3_args

llama3_args |= {
    f"8B-{layers}": dataclasses.replace(llama3_args["8B"], n_layers=layers) for layers in (1, 2, 4, 8, 16)
}
