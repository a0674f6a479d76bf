"""torchtitan 0.2: the converter of ``--model.converters f8sub``, and the ``[f8sub]`` section of its TOML.

Experts of torchtitan 0.2 have a forward of their own that multiplies in a function that no module could replace.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools.logging import logger

import f8sub
from f8sub.diagnostics.report import conversion_report
from f8sub.experts.grouped_linear import swiglu
from f8sub.integrations.torchtitan.hooks import FILE
from f8sub.integrations.torchtitan.options import Options, convert, tokens_of


def register_grouped_experts(backend: str | None) -> None:
    """Have ``convert_to_float8`` convert ``GroupedExperts``, by its option ``experts``.

    torchtitan pads each expert's tokens for torch's grouped product; f8sub's takes groups of any size.

    Args:
        backend: of ``torch.compile`` for what lies between the products, as torchtitan has it for all of its own
            function; None where it compiles no model.
    """
    gated: Callable[..., Any] = (
        swiglu if backend is None else torch.compile(swiglu, backend=backend, fullgraph=True)
    )

    def forward(module: Any, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        # Experts' tokens stand one expert after the other: x [tokens, K], w1 and w3 [E, N, K], w2 [E, K, N].
        ends = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        return f8sub.grouped_swiglu(x, module.w1, module.w3, module.w2, ends, act=gated).type_as(x)

    f8sub.register_experts(GroupedExperts, weights=("w1", "w2", "w3"), forward=forward, down="w2")


__all__ = ["Float8ModelConverter", "JobConfig"]

NAME = "f8sub"


@dataclass
class JobConfig:
    """Adds the section of f8sub to torchtitan's job config, by ``--job.custom_config_module=f8sub.titan``."""

    f8sub: Options = field(default_factory=Options)


class Float8ModelConverter:
    """Converts a model's linear layers and experts to float8, when torchtitan 0.2 has built it and before it shards it.

    Raises:
        Float8ConfigError: the job's config has no section of f8sub's.
    """

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        options = getattr(job_config, NAME, None)
        if not isinstance(options, Options):
            raise f8sub.Float8ConfigError(
                f"--model.converters has {NAME!r}, and the job's config has no section [{NAME}]: give "
                "--job.custom_config_module=f8sub.titan, or custom_config_module in the TOML's [job]"
            )
        file = options.monitor_file or str(Path(job_config.job.dump_folder) / FILE)
        self.options = replace(options, monitor_file=file)
        self.tokens = tokens_of(job_config.training, job_config.parallelism)
        # Eager SwiGLU between the products costs three passes over memory.
        compiled = job_config.compile.enable and "model" in job_config.compile.components
        register_grouped_experts(job_config.compile.backend if compiled else None)

    def convert(self, model: torch.nn.Module) -> None:
        """Convert the model on meta, in place.

        Raises:
            Float8ConfigError: as of ``f8sub.integrations.torchtitan.options.convert``.
        """
        convert(model, self.options, {}, self.tokens)
        logger.info(f"f8sub: {conversion_report(model).summary}")

    def post_optimizer_hook(self, model: torch.nn.Module | list[torch.nn.Module]) -> None:
        """Do nothing: a hook of torchtitan's container of optimizers computes the scales, of all parts of the model."""


register_model_converter(Float8ModelConverter, NAME)
