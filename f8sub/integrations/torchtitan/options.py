"""Options: what torchtitan's users ask for; and the one conversion of their model, for any version of torchtitan."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import torch

from f8sub.convert.class_swap import extensions
from f8sub.convert.convert import convert_to_float8
from f8sub.convert.patterns import layer_keep_x, layer_recipes
from f8sub.convert.products import kind_of
from f8sub.convert.selection import MIN_DIM
from f8sub.convert.swiglu_input import keep_swiglu_input_in_float8
from f8sub.errors import Float8ConfigError, unknown
from f8sub.experts.seams import AUTO_EXCHANGED, AUTO_EXPERTS, EXPERTS
from f8sub.integrations.one_line import (
    HIGH_PRECISION,
    attend_once,
    has_attention,
    refuse_unknown_attention,
)
from f8sub.integrations.torchtitan.experts import dispatch_in_float8
from f8sub.integrations.torchtitan.fused_steps import FUSED, fuse_at_first_step
from f8sub.integrations.torchtitan.hooks import (
    FILE,
    KEEP,
    PRECOMPUTE,
    WANTED,
    attach_at_first_step,
    check_at_first_forward,
    monitor_from_first_forward,
    reduce_from_first_forward,
    set_policy,
)
from f8sub.linear.checkpointing import checkpoint_policy
from f8sub.linear.saved_input import AUTO
from f8sub.recipe import Recipe, get_recipe
from f8sub.recipes import DEFAULT

Model = TypeVar("Model", bound=torch.nn.Module)

AUTO_FILTER = "auto_filter_small_kn"
"""In ``filter_fqns``, torchtitan's word for: leave layers alone that are too small to gain, all of them if need be."""

SPELLED = {"true": True, "false": False}
"""``experts`` as a command line has it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a conversion, by torchtitan's names.

    The annotations are for torchtitan's parser of command lines and TOML; in code any sequence or mapping will do.

    torchtitan 0.2 reads it as the section ``[f8sub]`` and the options ``--f8sub.*``: lists are arrays in TOML, and
    separated by commas on the command line. torchtitan 0.3 has the same fields in ``Float8Converter.Config``.

    Attributes:
        recipe_name: one of ``f8sub.recipe_names()``, or a mapping from glob patterns over layers' names to them.
        recipe_options: the recipe's own, as ``f8sub.get_recipe`` takes them, dtypes by name too, in TOML and JSON lists
            and tables too; where ``recipe_name`` is a mapping, one from names of recipes to the options of each.
        filter_fqns: a layer whose name contains one of these strings is left alone; ``"auto_filter_small_kn"`` too.
        skip: glob patterns over whole segments of names, see ``f8sub.convert_to_float8``.
        skip_defaults: leave output heads, routers, LoRA adapters and small layers alone, as ``convert_to_float8``.
        enable_fsdp_float8_all_gather: weights are gathered as float8.
        precompute_float8_dynamic_scale_for_fsdp: one all-reduce computes the scales of all weights after each optimizer
            step; None for wherever the weights are gathered as float8.
        reduce_gradients_in_float8: gradients are e4m3 on the wire, added in float32; see
            ``f8sub.reduce_gradients_in_float8``. Take float32 for ``mixed_precision_reduce``, torchtitan's default.
        dispatch_tokens_in_float8: tokens travel to experts of other ranks, and dy back, in float8, in the format of the
            recipe, rowwise or blockwise; see ``f8sub.dispatch_tokens_in_float8``.
        fuse_optimizer_step: AdamW, clipping and the amaxes of the new weights are one pass; see
            ``f8sub.optim.fuse_step``. Take ``fused`` for the optimizer's ``implementation``, torchtitan's default.
        keep_swiglu_input: "float8" rounds the results of w1 and w3, which changes numbers, so that compiled code saves
            a byte of each element; see ``f8sub.keep_swiglu_input_in_float8``.
        checkpoint_policy: what blocks save that activation checkpointing wrapped, one of those of
            ``f8sub.checkpoint_policy`` in place of torchtitan's; empty for torchtitan's.
        attention: "float8" runs ``scaled_dot_product_attention`` over 8192 tokens and more by cuDNN's float8 kernels,
            which changes numbers; "float8_forward" with its backward in bf16; see ``f8sub.attend_in_float8``. The
            FlexAttention of torchtitan 0.3's language models is an error. With ``emulate`` sequences of any length.
        emulate: exact GEMMs of plain PyTorch, on any device: the ``reference`` backend.
        keep_x: what is saved of x, see ``f8sub.convert_to_float8``; a mapping from glob patterns too.
        experts: "auto" converts experts of mixtures that are predicted to gain, with expert parallelism as
            "auto_expert_parallel" of ``f8sub.convert_to_float8``; true all, false none.
        tokens: of one forward, on all GPUs that share experts; None for those of the job's config, where it is known.
        monitor_every: an ``f8sub.Monitor`` measures one step of so many; 0 for none.
        monitor_file: its rows, as JSON lines; empty for numerics.jsonl in the job's dump folder (0.2) or outputs (0.3).

    Raises:
        Float8ConfigError: no such recipe, option or value of one, ``keep_x``, attention or policy, a string in place
            of a list of them, or scales to precompute for weights that are not gathered as float8.
    """

    recipe_name: str | dict[str, str] = DEFAULT
    recipe_options: dict[str, bool | int | float | str] = field(default_factory=dict)
    filter_fqns: list[str] = field(default_factory=list)
    skip: list[str] = field(default_factory=list)
    skip_defaults: bool = True
    enable_fsdp_float8_all_gather: bool = True
    precompute_float8_dynamic_scale_for_fsdp: bool | None = None
    reduce_gradients_in_float8: bool = False
    dispatch_tokens_in_float8: bool = False
    fuse_optimizer_step: bool = False
    keep_swiglu_input: str = "high_precision"
    checkpoint_policy: str = ""
    attention: str = HIGH_PRECISION
    emulate: bool = False
    keep_x: str | dict[str, str] = AUTO
    experts: bool | str = EXPERTS
    tokens: int | None = None
    monitor_every: int = 0
    monitor_file: str = ""

    def __post_init__(self) -> None:
        # Errors come where the options are given, before a model is built.
        layer_recipes(self.recipe)
        layer_keep_x(self.keep_x)
        if self.keep_swiglu_input not in ("high_precision", "float8"):
            raise unknown("keep_swiglu_input", self.keep_swiglu_input, ("high_precision", "float8"))
        refuse_unknown_attention(self.attention)
        if self.checkpoint_policy:
            checkpoint_policy(self.checkpoint_policy)
        if self.monitor_every < 0:
            raise Float8ConfigError(f"monitor_every={self.monitor_every} is less than 0, which is for none")
        for name in ("filter_fqns", "skip"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise Float8ConfigError(f"{name}={value!r} is a string; give a list of strings, [{value!r}]")
        if self.precompute_float8_dynamic_scale_for_fsdp and not self.enable_fsdp_float8_all_gather:
            raise Float8ConfigError(
                "precompute_float8_dynamic_scale_for_fsdp=True makes the scales of weights that are gathered as "
                "float8, and enable_fsdp_float8_all_gather=False gathers none so; change one of the two"
            )

    @property
    def recipe(self) -> Recipe | dict[str, Recipe]:
        """The recipe with its options, or that of each pattern."""
        name = self.recipe_name
        options: Mapping[str, Any] = self.recipe_options
        if not isinstance(options, Mapping):
            raise Float8ConfigError(
                f'recipe_options={options!r} is no mapping; give one of options, {{"margin": 2}}'
            )
        if not isinstance(name, Mapping):
            return _with_options(name, options)
        names = sorted({each for each in name.values() if isinstance(each, str)})
        for each, own in options.items():
            if each not in names or not isinstance(own, Mapping):
                raise Float8ConfigError(
                    f"recipe_options has {each!r}: {own!r}; recipe_name is a mapping to {names}, so give a mapping "
                    "from these names to the options of each"
                )
        return {pattern: _with_options(each, options.get(each, {})) for pattern, each in name.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON can hold them, by torchtitan's name for that."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    @property
    def precompute(self) -> bool:
        """True if scales are computed after each optimizer step."""
        wanted = self.precompute_float8_dynamic_scale_for_fsdp
        # Without a float8 all-gather there are no scales to compute ahead.
        return self.enable_fsdp_float8_all_gather if wanted is None else wanted


def known(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options as they were given; Float8ConfigError where ``Options`` has none of a name."""
    names = [each.name for each in fields(Options)]
    for name in options:
        if name not in names:
            raise unknown("option of f8sub", name, names)
    return options


def _plain(value: Any) -> Any:
    """Return an option that was given in code as JSON can hold it, a dtype or a function by its name."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    named = getattr(value, "__qualname__", type(value).__name__) if callable(value) else value
    return named if isinstance(named, (str, int, float, type(None))) else str(named)


def _with_options(name: Any, options: Mapping[str, Any]) -> Recipe:
    """Return ``get_recipe`` of what a command line can say, with errors that say where it was said."""
    read = {option: _dtype_or_itself(value) for option, value in options.items()}
    try:
        return get_recipe(name, **read)
    except (ValueError, TypeError) as error:
        if not options:
            raise
        raise Float8ConfigError(
            f"recipe_options={dict(options)!r} of recipe {name!r} cannot be used: {error}"
        ) from error


def _dtype_or_itself(value: Any) -> Any:
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    return dtype if isinstance(dtype, torch.dtype) else value


class JobTokens(NamedTuple):
    """Holds the tokens of one forward on all GPUs that share experts.

    Attributes:
        number: how many; None where that is not known.
        exchanged: whether GPUs have experts of their own, and tokens travel between them.
    """

    number: int | None = None
    exchanged: bool = False


NOT_KNOWN = JobTokens()


def tokens_of(training: Any, parallelism: Any) -> JobTokens:
    """Return the tokens by the sections of a job's config.

    Args:
        training: with the tokens of a data-parallel rank: ``local_batch_size`` and ``seq_len`` up to torchtitan 0.3.
        parallelism: with the degrees of each kind.

    Returns:
        None as their number for a config whose names are not known.
    """
    try:
        if hasattr(training, "num_tokens_per_microbatch_per_dp_rank"):  # after 0.3
            tokens = training.num_tokens_per_microbatch_per_dp_rank
        else:
            is_cut = parallelism.pipeline_parallel_degree > 1
            batch = parallelism.pipeline_parallel_microbatch_size if is_cut else training.local_batch_size
            tokens = batch * training.seq_len
        tokens //= parallelism.context_parallel_degree
        experts, tensors = parallelism.expert_parallel_degree, parallelism.tensor_parallel_degree
    except AttributeError:
        return NOT_KNOWN
    if experts == 1:
        return JobTokens(int(tokens))
    # Ranks of tensor parallelism divide the tokens, unless they divide each expert.
    whole = getattr(parallelism, "expert_tensor_parallel_degree", 1) > 1
    return JobTokens(int(tokens * experts // (1 if whole else tensors)), exchanged=True)


def _refuse_other_attention(model: torch.nn.Module, asked: str) -> None:
    """Refuse a model none of whose modules calls ``scaled_dot_product_attention``, before it changes."""
    if has_attention(model):
        return
    leaves = [type(module).__name__ for module in model.modules() if not module._modules]
    found = (
        ", ".join(dict.fromkeys(name for name in leaves if "Attention" in name)) or "none that f8sub knows"
    )
    raise Float8ConfigError(
        f"attention={asked!r}: the model's attention is {found}, and f8sub takes scaled_dot_product_attention. Give "
        "the model torchtitan's ScaledDotProductAttention, which attends over the borders of documents, or leave out "
        "the option"
    )


def convert(
    model: Model,
    options: Options,
    linear_classes: Mapping[type[torch.nn.Linear], Mapping[str, Any]],
    tokens: JobTokens = NOT_KNOWN,
) -> Model:
    """Convert a model that torchtitan just built, in place, before any parallelism.

    Args:
        model: on meta.
        options: what was asked for.
        linear_classes: torchtitan's own subclasses of nn.Linear, see ``class_swap.extensions``.
        tokens: ``tokens_of`` the job, where its config is known.

    Raises:
        Float8ConfigError: nothing is left to convert, a string of ``filter_fqns`` is in no layer's name, or attention
            in float8 of a model without ``scaled_dot_product_attention``.
    """
    # torchtitan's linear layers are subclasses of nn.Linear, which convert only where they are known.
    extensions.update(linear_classes)
    names = {fqn: module for fqn, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    filters = [text for text in options.filter_fqns if text != AUTO_FILTER]
    if idle := [text for text in filters if not any(text in fqn for fqn in names)]:
        raise Float8ConfigError(
            f"filter_fqns={idle} is in no linear layer's name; the model has "
            f"{', '.join(dict.fromkeys(map(kind_of, names)))}"
        )
    if options.attention != HIGH_PRECISION:
        _refuse_other_attention(model, options.attention)
    experts = SPELLED.get(str(options.experts).lower(), options.experts)
    convert_to_float8(
        model,
        options.recipe,
        filter_fqns=filters,
        skip=options.skip,
        skip_defaults=options.skip_defaults,
        # the limit itself, also for a small model, as torchtitan has it
        min_dim=MIN_DIM if AUTO_FILTER in options.filter_fqns else None,
        float8_all_gather=options.enable_fsdp_float8_all_gather,
        backend="reference" if options.emulate else "auto",
        keep_x=options.keep_x,
        experts=AUTO_EXCHANGED if tokens.exchanged and experts == AUTO_EXPERTS else experts,
        tokens=tokens.number if options.tokens is None else options.tokens,
    )
    attend_once(model, options.attention, emulated=options.emulate)
    # torchtitan compiles and shards the model later, and hands it back to nobody before it runs.
    check_at_first_forward(model)
    if options.reduce_gradients_in_float8:
        reduce_from_first_forward(model)
    if options.dispatch_tokens_in_float8:
        dispatch_in_float8(model, options.recipe, may_travel=tokens.number is None or tokens.exchanged)
    if options.keep_swiglu_input == "float8":
        keep_swiglu_input_in_float8(model)
    if options.checkpoint_policy:
        setattr(model, KEEP, options.checkpoint_policy)
        model.register_forward_pre_hook(set_policy)
    # On the model: torchtitan copies it for pipeline stages, and the copies keep attributes.
    setattr(model, PRECOMPUTE, options.precompute)
    if options.precompute:
        attach_at_first_step()
    if options.fuse_optimizer_step:
        setattr(model, FUSED, True)
        fuse_at_first_step()
    if options.monitor_every:
        setattr(model, WANTED, (options.monitor_every, options.monitor_file or f"outputs/{FILE}"))
        monitor_from_first_forward(model)
    return model
