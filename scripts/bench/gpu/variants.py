"""What is compared: a layer or model in bf16, by torchao, by TransformerEngine, by f8sub; eager and compiled."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import f8sub
from f8sub.formats import E2M1
from f8sub.kernels.gemm.select import Plan
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.weight import local_tensor
from scripts.bench.gpu import transformer_engine_layers

BF16 = "bf16"
TRANSFORMER_ENGINE = "TransformerEngine"
GRAPHED_RECIPES = ("tensorwise", "blockwise")
"""Whose compiled steps are run as CUDA graphs where no variants are asked for by name."""

LIGER_RECIPES = ("", "tensorwise", "rowwise")
"""Which are run with Liger-Kernel too, in eager code, where they are asked for by name."""

TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
HEAD = "lm_head"
"""No library converts it."""

FLOORS_DB = {BF16: 40.0, "torchao": 20.0, TRANSFORMER_ENGINE: 20.0, "f8sub": 20.0}
"""Of y, dx and dw of one layer: bf16 rounds to 50 dB, e4m3 by e4m3 reaches 28.5, e5m2 by e4m3 24.5."""

FLOOR_OF_FOUR_BITS_DB = 10.0


@dataclass(frozen=True)
class Variant:
    """One way to run the linear layers."""

    library: str  # "bf16", "torchao", "TransformerEngine" or "f8sub"
    recipe: str  # empty for bf16
    compiled: bool  # of TransformerEngine's blocks what is between its modules, which torch.compile cannot
    graphed: bool = False  # a whole step as one CUDA graph, of a model that is not sharded
    liger: bool = False  # transformers' norms and feed-forwards are Liger-Kernel's; of the slice alone

    @property
    def name(self) -> str:
        """Of its row."""
        how = ["compiled" if self.compiled else "eager"]
        how += ["graphed"] * self.graphed + ["with Liger-Kernel"] * self.liger
        return " ".join(filter(None, (self.library, self.recipe, *how)))

    @property
    def is_of_steps(self) -> bool:
        """Whether one layer has nothing of it."""
        return self.graphed or self.liger or (self.library == TRANSFORMER_ENGINE and self.compiled)

    @property
    def passes_before_scales(self) -> int:
        """Before whose results have the precision that training has."""
        return transformer_engine_layers.PASSES_BEFORE_SCALES.get(self.recipe, 0)

    @property
    def is_default(self) -> bool:
        """Whether it is run where none is asked for by name."""
        if self.graphed:
            return self.library == "f8sub" and self.compiled and self.recipe in GRAPHED_RECIPES
        return not self.liger

    @property
    def floor_db(self) -> float:
        """The least SQNR with which one layer's results are worth timing."""
        if self.library == "f8sub" and f8sub.get_recipe(self.recipe).formats("x")[0].dtype == E2M1:
            return FLOOR_OF_FOUR_BITS_DB
        return FLOORS_DB[self.library]

    def why_not(self, device: torch.device) -> str | None:
        """Why it cannot be measured on ``device``; None where it can."""
        if self.graphed and device.type != "cuda":
            return "a CUDA graph needs a CUDA device"
        if self.graphed and self.library == "f8sub" and f8sub.get_recipe(self.recipe).delayed is not None:
            return "its histories roll between steps, and the host reads what they met: no graph records that"
        if self.liger and (device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None):
            return "Liger-Kernel needs a CUDA device, and liger-kernel installed"
        if self.library == "torchao":
            try:
                importlib.import_module("torchao.float8")
            except ImportError as error:
                return f"torchao cannot be imported: {error}"
        if self.library == TRANSFORMER_ENGINE:
            return transformer_engine_layers.why_not(device)
        if self.library == "f8sub" and device.type == "cuda":
            plan = Plan.make(f8sub.get_recipe(self.recipe), device)
            gemms = [name for name in ("fprop", "dgrad", "wgrad") if getattr(plan, name) == "reference"]
            if gemms:
                return f"{' and '.join(gemms)} would be of the reference, which is no kernel"
        return None

    def convert(self, model: nn.Module, *, sharded: bool) -> nn.Module:
        """The linear layers below ``model`` as this variant has them, before FSDP2 shards them where it does."""
        if self.library == "torchao":
            return self._convert_by_torchao(model, sharded)
        if self.library == TRANSFORMER_ENGINE:
            attend = self.compile(transformer_engine_layers.attend, next(model.parameters()).device)
            return transformer_engine_layers.convert(model, self.recipe, attend)
        if self.library == "f8sub":
            return f8sub.convert_to_float8(model, recipe=self.recipe)
        return model

    def _convert_by_torchao(self, model: nn.Module, sharded: bool) -> nn.Module:
        float8 = importlib.import_module("torchao.float8")
        if self.recipe == "tensorwise":
            config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=sharded)
        else:
            config = float8.Float8LinearConfig.from_recipe_name(self.recipe)
        converted: nn.Module = float8.convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, fqn: HEAD not in fqn
        )
        return converted

    def compile(self, function: Any, device: torch.device) -> Any:
        """A module or function, compiled where the variant is; Inductor's C++ for CPUs is not what is measured."""
        if not self.compiled or isinstance(function, transformer_engine_layers.Block):
            return function
        backend = "inductor" if device.type == "cuda" else "aot_eager"
        return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)

    def mark_changed(self, model: nn.Module) -> None:
        """Have the weights count as changed, as after an optimizer's step: f8sub keeps the codes of one that is not."""
        for parameter in model.parameters():
            weight = local_tensor(parameter)
            if isinstance(weight, MasterWeight):
                weight.mark_stale()

    def precompute(self, model: nn.Module) -> None:
        """What the library asks for after every optimizer step."""
        if self.library == "f8sub":
            f8sub.precompute_scales(model)
        elif self.library == "torchao" and self.recipe == "tensorwise":
            importlib.import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(model)


def all_variants() -> list[Variant]:
    """bf16 first; torchao last, because converting with it changes how Inductor writes minima and maxima.

    Graphed ones after all others, in the same order.
    """
    found = [Variant(BF16, "", compiled) for compiled in (True, False)]
    found += [Variant("f8sub", recipe, c) for recipe in f8sub.recipe_names() for c in (True, False)]
    engines = transformer_engine_layers.RECIPES
    found += [Variant(TRANSFORMER_ENGINE, recipe, c) for recipe in engines for c in (True, False)]
    found += [Variant("torchao", recipe, True) for recipe in TORCHAO_RECIPES]
    eager = [v for v in found if not v.compiled and v.recipe in LIGER_RECIPES]
    return [
        *found,
        *(dataclasses.replace(variant, liger=True) for variant in eager),
        *(dataclasses.replace(variant, graphed=True) for variant in found),
    ]


def match_each(only: Sequence[str], names: Iterable[str]) -> None:
    """Raise ValueError for a pattern that matches no name."""
    names = list(names)
    for pattern in only:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"--only {pattern!r} matches none of {names}")


def chosen(
    only: Sequence[str], device: torch.device, *, of_layers: bool = False
) -> tuple[list[Variant], dict[str, str]]:
    """Variants whose names match one of the patterns, bf16 ones to compare with, and of those left out the reasons.

    ``of_layers`` leaves out those of which one layer has nothing.
    """
    candidates = [v for v in all_variants() if not (of_layers and v.is_of_steps)]
    asked = [
        v for v in candidates if (any(fnmatch.fnmatch(v.name, p) for p in only) if only else v.is_default)
    ]
    compared = {v.graphed for v in asked} or {False}
    baselines = [v for v in candidates if v.library == BF16 and v.graphed in compared and not v.liger]
    reasons = {v: v.why_not(device) for v in candidates if v in asked or v in baselines}
    skipped = {variant.name: reason for variant, reason in reasons.items() if reason is not None}
    return [variant for variant in reasons if variant.name not in skipped], skipped


def allow_recompiles() -> None:
    """All variants share the code of a layer's forward, and each of them compiles it for its own."""
    torch._dynamo.config.recompile_limit = 64
