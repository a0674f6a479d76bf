"""``recipes/pretrain.py`` with one arm of ``scripts/loss_compare.py``: a recipe, a change of it, or bf16.

The arm comes first, then the settings of recipes/pretrain.py. A change follows the recipe's name and a plus sign:

    python scripts/bench/pretrain_arm.py tensorwise+fprop --model.size 120m --training.steps 400

At the end the held-out loss of the same weights is measured in other forward passes, too, and written to
metrics.jsonl as ``forwards``: that of plain bf16, that of the arm's own recipe, and for bf16 with x, w or both rounded
to float8 in all layers or in some. These differences have no noise of training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

import f8sub
from f8sub import torch_compat
from f8sub.attention import cudnn
from f8sub.formats import ScaleRule
from f8sub.gradients import wire
from f8sub.weights.weight import local_tensor

ATTENTION, FEED_FORWARD = "*.self_attn.*", "*.mlp.*"
FIRST_AND_LAST = ("model.layers.0.*", "model.layers.15.*")
"""Of the 16 blocks of 120m."""


def exact_sums(recipe: f8sub.Recipe) -> f8sub.Recipe:
    """No narrow accumulator in fprop."""
    return replace(recipe, fprop=replace(recipe.fprop, fast_accum=False))


def e4m3_dy(recipe: f8sub.Recipe) -> f8sub.Recipe:
    """Give dy the format of w in dgrad, and that of x in wgrad."""
    dgrad, wgrad = replace(recipe.dgrad, a=recipe.dgrad.b), replace(recipe.wgrad, a=recipe.wgrad.b)
    return replace(recipe, dgrad=dgrad, wgrad=wgrad)


def powers_of_2(recipe: f8sub.Recipe) -> f8sub.Recipe:
    """Every scale is rounded down to a power of two."""

    def rounded(spec: f8sub.GemmSpec) -> f8sub.GemmSpec:
        assert spec.a is not None
        assert spec.b is not None
        a, b = (replace(one, scale_rule=ScaleRule.POWER_OF_2) for one in (spec.a, spec.b))
        return replace(spec, a=a, b=b)

    return replace(recipe, **{gemm: rounded(getattr(recipe, gemm)) for gemm in ("fprop", "dgrad", "wgrad")})


def coarse_x(recipe: f8sub.Recipe) -> f8sub.Recipe:
    """The control that must fail: x has two bits of mantissa in fprop. No kernel multiplies e5m2 by e5m2 in wgrad."""
    assert recipe.fprop.a is not None
    x = replace(recipe.fprop.a, dtype=torch.float8_e5m2)
    return replace(recipe, fprop=replace(recipe.fprop, a=x), wgrad=f8sub.GemmSpec(a=None, b=None))


CHANGES: dict[str, Callable[[f8sub.Recipe], f8sub.Recipe]] = {
    "fprop": lambda recipe: recipe.with_high_precision(dgrad=True, wgrad=True),
    "dgrad": lambda recipe: recipe.with_high_precision(fprop=True, wgrad=True),
    "wgrad": lambda recipe: recipe.with_high_precision(fprop=True, dgrad=True),
    "exact_sums": exact_sums,
    "e4m3_dy": e4m3_dy,
    "powers_of_2": powers_of_2,
    "coarse_x": coarse_x,
}
"""Of the recipe's three GEMMs; those named alone are the only ones in float8."""

GRADIENTS = "gradients_in_float8"
UNROUNDED = "unrounded_gradients"
ENDS = {"bf16_end": 0.1, "bf16_twentieth": 0.05}
"""The changes whose arms train the last part of their own steps in bf16, by ``float8.until_step``: its share."""
ATTENTIONS = {"attention_in_float8": "float8", "attention_forward_in_float8": "bf16"}
"""What ``attend_in_float8`` computes backward in. Its kernels take head dim 128 in the first, any in the second."""

SKIPPED: dict[str, tuple[str, ...]] = {
    "attention": (FEED_FORWARD,),
    "feed_forward": (ATTENTION,),
    "inner_blocks": FIRST_AND_LAST,
}
"""Layers that stay in bf16."""


class Arm(NamedTuple):
    """An arm: its recipe, None for bf16; the layers that it skips; attention's backward, "" without float8 there.

    With ``codes_gradients`` each weight's gradient is rounded once, as ``f8sub.reduce_gradients_in_float8`` rounds what
    a rank sends. Here one GPU is the only rank, and sends nothing. With ``unrounded`` gradients of layers in float8 are
    reduced in place, as several ranks do. ``in_bf16`` is the share of its last steps in bf16.
    """

    recipe: f8sub.Recipe | None
    skip: tuple[str, ...] = ()
    attention: str = ""
    codes_gradients: bool = False
    unrounded: bool = False
    in_bf16: float = 0.0


def arm_of(name: str) -> Arm:
    """Give the arm of a name.

    Raises:
        SystemExit: If there is no such arm.
    """
    base, *changes = name.split("+")
    if base == "bf16":
        if changes:
            sys.exit(f"pretrain_arm.py: {name!r} changes a recipe, and bf16 has none")
        return Arm(None)
    recipe = f8sub.get_recipe(base)
    arm = Arm(recipe)
    for change in changes:
        if change in CHANGES:
            recipe = CHANGES[change](recipe)
            arm = arm._replace(recipe=recipe)
        elif change in SKIPPED:
            arm = arm._replace(skip=arm.skip + SKIPPED[change])
        elif change in ATTENTIONS:
            arm = arm._replace(attention=ATTENTIONS[change])
        elif change == GRADIENTS:
            arm = arm._replace(codes_gradients=True)
        elif change == UNROUNDED:
            arm = arm._replace(unrounded=True)
        elif change in ENDS:
            arm = arm._replace(in_bf16=ENDS[change])
        else:
            there = [*CHANGES, *SKIPPED, *ATTENTIONS, GRADIENTS, UNROUNDED, *ENDS]
            sys.exit(f"pretrain_arm.py: {name!r} has no change {change!r}; there are {there}")
    return arm


def attention_backend() -> str:
    """The kernels on a GPU, the reference elsewhere; never high precision without a word."""
    if not torch.cuda.is_available():
        return "reference"
    if (reason := cudnn.why_not(torch.device("cuda", torch.cuda.current_device()))) is not None:
        raise SystemExit(f"an arm with attention in float8: {reason}")
    return "auto"


def convert(arm: Arm, model: nn.Module, settings: Any) -> None:
    """What f8sub_pretrain's function of this name does, with what the arm is."""
    f8sub.convert_to_float8(
        model,
        recipe=arm.recipe,
        skip=(*settings.float8.skip, *arm.skip),
        experts=settings.float8.experts,
        tokens=settings.training.local_batch_size * settings.training.seq_len,
    )
    if arm.attention:
        # Numbers are compared, also of sequences that are too short to gain time.
        f8sub.attend_in_float8(model, backward=arm.attention, min_length=1, backend=attention_backend())


FORWARDS: dict[str, dict[str, Any]] = {
    "x and w": {"operands": "xw"},
    "x": {"operands": "x"},
    "w": {"operands": "w"},
    "x and w by rows": {"operands": "xw", "recipe": "rowwise"},
    "x and w by blocks": {"operands": "xw", "recipe": "blockwise"},
    "x in e5m2": {"operands": "x", "dtype": torch.float8_e5m2},
    "attention": {"operands": "xw", "of": "self_attn"},
    "feed-forward": {"operands": "xw", "of": "mlp"},
    "down projections": {"operands": "xw", "of": "down_proj"},
}
"""What is rounded in a forward pass of weights that bf16 trained; the products stay in bf16."""


@contextmanager
def rounded(
    model: nn.Module,
    operands: str,
    recipe: str = "tensorwise",
    dtype: torch.dtype | None = None,
    of: str = "",
) -> Iterator[None]:
    """Round x, w or both of the model's linear layers but the head to the recipe's formats in the block."""
    fprop = f8sub.get_recipe(recipe).fprop
    x_format, w_format = fprop.a, fprop.b
    assert x_format is not None
    assert w_format is not None
    if dtype is not None:
        x_format = replace(x_format, dtype=dtype)
    layers = [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and "lm_head" not in name and of in name
    ]

    def near(tensor: torch.Tensor, kind: Any) -> torch.Tensor:
        matrix = tensor.flatten(0, -2)
        return f8sub.quantize(matrix, kind, columnwise=False).dequantize().view_as(tensor)

    hooks, kept = [], []
    for layer in layers:
        if "x" in operands:
            hooks.append(
                layer.register_forward_pre_hook(lambda _, args: (near(args[0], x_format), *args[1:]))
            )
        if "w" in operands:
            shard = layer.weight.to_local() if isinstance(layer.weight, DTensor) else layer.weight.detach()
            kept.append((shard, shard.clone()))
            shard.copy_(near(shard.bfloat16(), w_format))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for shard, values in kept:
            shard.copy_(values)


def code_gradient(parameter: torch.Tensor) -> None:
    """Round a float32 gradient to the codes of the wire, in blocks of 128 elements of its rank's part."""
    assert parameter.grad is not None
    shard = local_tensor(parameter.grad)
    shard.copy_(wire.decode(*wire.encode(shard.reshape(1, -1))).view_as(shard))


def reduce_in_place() -> list[Any]:
    """Have FSDP2 reduce gradients where they lie on one rank, too; return its groups once the first forward began."""
    decided, groups = torch_compat._reduce_in_place, []

    def reduce(group: Any) -> None:
        decided(group)
        group._reduce_scatter_comm.is_in_place = True
        groups.append(group)

    torch_compat._reduce_in_place = reduce
    return groups


def install(arm: Arm) -> None:
    """Have recipes/pretrain.py, whose folder is on the path, train this arm and measure its forward passes."""
    import pretrain
    from f8sub_pretrain import model as trainers

    if arm.recipe is not None:
        trainers.convert = partial(convert, arm)
    groups = reduce_in_place() if arm.unrounded else []

    class Measuring(pretrain.Trainer):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            for parameter in self.model.parameters() if arm.codes_gradients else ():
                parameter.register_post_accumulate_grad_hook(code_gradient)

        def resume(self) -> None:
            super().resume()
            if arm.in_bf16:
                steps = self.settings.training.steps
                last = steps - round(arm.in_bf16 * (steps - self.step))
                float8 = replace(self.settings.float8, until_step=last)
                self.settings = replace(self.settings, float8=float8)

        def evaluate(self) -> None:
            if arm.unrounded and torch.float32 not in {group.gradient_dtype for group in groups}:
                sys.exit(
                    "pretrain_arm.py: no gradient is reduced in place; that asks for FSDP2's default on a GPU"
                )
            super().evaluate()
            if self.step == self.settings.training.steps:
                self.metrics.write({"step": self.step, "forwards": self.forwards()})

        @torch.no_grad()
        def forwards(self) -> dict[str, float]:
            """Give the held-out loss of the final weights by what their forward pass is computed in."""
            found = {"own": self.held_out_loss()}
            trained, settings = self.model, self.settings
            weights = {name: value.clone() for name, value in get_model_state_dict(trained).items()}
            eager = replace(settings.compile, enabled=False)
            settings = replace(settings.without_float8(), compile=eager)
            self.model, _ = trainers.build_model(settings, self.tokenizer.vocab_size, self.mesh)
            # Attention in float8 has histories of its own.
            plain = self.model.state_dict().keys()
            set_model_state_dict(self.model, {name: w for name, w in weights.items() if name in plain})
            found["bf16"] = self.held_out_loss()
            if arm.recipe is None:
                for name, how in FORWARDS.items():
                    with rounded(self.model, **how):
                        found[name] = self.held_out_loss()
            self.model = trained
            return found

    pretrain.Trainer = Measuring


def main() -> None:
    name, *others = sys.argv[1:] or [""]
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root / "recipes")]
    arm = arm_of(name)
    import pretrain

    install(arm)
    sys.argv[1:] = others
    pretrain.main()


if __name__ == "__main__":
    main()
