"""``recipes/pretrain.py`` with torchao's float8 layers: the peer of the main job, for its speed and its losses.

The recipe comes first, then the settings of recipes/pretrain.py, which are those of a run without f8sub. What f8sub
would convert is converted. Tensorwise has torchao's float8 all-gather, and one all-reduce of scales after every
optimizer step. On a CPU torchao emulates float8.

    torchrun --nproc-per-node 2 scripts/bench/pretrain_torchao.py tensorwise --model.size 1b --compile.enabled true
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import f8sub

RECIPES = ("tensorwise", "rowwise")


def install(recipe: str, emulated: bool) -> None:
    """Have recipes/pretrain.py, whose folder is on the path, build torchao's layers into its Llama."""
    from f8sub_pretrain import model as trainers
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    plain, draw, build = trainers.LlamaForCausalLM, trainers.draw_weights, trainers.build_model
    if recipe == "tensorwise":
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulated)
    else:
        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulated)
    models: list[torch.nn.Module] = []

    class Converted(plain):  # type: ignore[misc, valid-type]
        def __init__(self, config_of_model: Any) -> None:
            super().__init__(config_of_model)
            ours = f8sub.convert_to_float8(plain(config_of_model))
            chosen = {fqn for fqn, module in ours.named_modules() if isinstance(module, f8sub.Float8Linear)}
            convert_to_float8_training(
                self, config=config, module_filter_fn=lambda module, fqn: fqn in chosen
            )
            models.append(self)

    def precompute(optimizer: Any, args: Any, kwargs: Any) -> None:
        precompute_float8_dynamic_scale_for_fsdp(models[0])

    trainers.LlamaForCausalLM = Converted
    # Weights are drawn in a model of their own, into which torchao need not look.
    trainers.draw_weights = lambda model, kind, *others: draw(model, plain, *others)
    trainers.build_model = lambda *settings: (build(*settings)[0], f"float8: torchao's, {recipe}")
    if recipe == "tensorwise":
        register_optimizer_step_post_hook(precompute)


def main() -> None:
    recipe, *others = sys.argv[1:] or [""]
    if recipe not in RECIPES:
        sys.exit(f"pretrain_torchao.py: the recipe comes first, {' or '.join(RECIPES)}; got {recipe!r}")
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root / "recipes")]
    on_cpu = not torch.cuda.is_available() or "cpu" in others
    install(recipe, emulated=on_cpu)
    import pretrain

    sys.argv[1:] = [*others, "--float8.enabled", "false"]
    pretrain.main()


if __name__ == "__main__":
    main()
