"""Settings of the training job: a TOML file, overridden by ``--section.key value`` on the command line."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro


class SettingsError(ValueError):
    """A setting that the job does not have, or a value that it cannot take."""


def _parse_flag(words: list[str]) -> bool:
    choices = {"true": True, "false": False}
    if words[0].lower() not in choices:
        raise ValueError(f"got {words[0]!r}, expected true or false")
    return choices[words[0].lower()]


Flag = Annotated[
    bool,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{true,false}",
        instance_from_str=_parse_flag,
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value).lower()],
    ),
]

AUTO = "auto"

FlagOrAuto = Annotated[
    bool | str,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{true,false,auto}",
        instance_from_str=lambda words: AUTO if words == [AUTO] else _parse_flag(words),
        is_instance=lambda value: isinstance(value, bool) or value == AUTO,
        str_from_instance=lambda value: [str(value).lower()],
    ),
]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Where the settings come from and where the results go."""

    config_file: str = ""
    """TOML file with the sections of this page; the command line overrides it."""
    dump_folder: str = "runs/pretrain"
    """Folder for metrics.jsonl, TensorBoard files and checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What to train, with random weights."""

    size: Literal[
        "debug",
        "10m",
        "60m",
        "120m",
        "120m-128",
        "1b",
        "8b",
        "8b-16",
        "moe-debug",
        "moe-120m",
        "moe-1b",
        "moe-30b-4",
    ] = "debug"
    """A Llama; "moe-": Qwen3-MoE, whose layers have 8, 32, 64 or 128 experts. 120m-128: 120m with heads of 128
    channels instead of 64. 8b-16: 16 layers of Llama 3 8B. moe-30b-4: 4 layers of Qwen3-30B-A3B."""
    attention: Literal["auto", "torch"] = "auto"
    """"auto": cuDNN's kernels first on Hopper, f8sub.prefer_cudnn_attention(), with float8 and without; "torch": in
    torch's order."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The text to train on."""

    source: str = "stdlib"
    """A text, jsonl or parquet file, a folder of them, the name of a Hugging Face dataset (owner/name or
    owner/name:config), or "stdlib": the Python source of the standard library on this machine."""
    text_field: str = "text"
    """The column of jsonl, parquet and Hugging Face data that holds the text."""
    tokenizer: str = "byte"
    """"byte", or a folder with a tokenizer that transformers can load."""
    eval_every_nth: int = 20
    """One document in so many is kept for evaluation and never trained on."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW."""

    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    one_pass: FlagOrAuto = "auto"
    """Clip, step and find the new weights' scales in one pass over memory, by f8sub.optim.fuse_step, with float8 and
    without; "auto": on GPUs. false: by torch's own kernels. The norm of the gradients may differ in its last bit."""


@dataclass(frozen=True, kw_only=True)
class LrScheduler:
    """Linear warmup, a constant rate if asked for, then a cosine down to ``min_lr_factor`` of the rate."""

    warmup_steps: int = 10
    decay_ratio: float = 1.0
    """The share of all steps over which the rate decays at the end, torchtitan's name; 1: all steps after the warmup;
    0: none."""
    min_lr_factor: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Training:
    """Length, batch and precision of the run."""

    steps: int = 100
    seq_len: int = 256
    local_batch_size: int = 8
    """Sequences of one rank in one micro-batch."""
    gradient_accumulation_steps: int = 1
    max_norm: float = 1.0
    """Gradients are clipped to this norm; 0 does not clip."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """What the forward and backward compute in; the master weights are float32. float16 uses a GradScaler."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """What FSDP2 sends gradients in and adds them in. bfloat16 sends half and rounds at every rank; a quarter, added
    in float32: ``float8.gradients``."""
    reshard_after_forward: Flag = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Float8:
    """What f8sub converts; everything else stays in ``training.dtype``."""

    enabled: Flag = True
    recipe: str = "tensorwise"
    """A name that f8sub.recipe_names() lists; empty is the same as enabled = false."""
    layer_recipes: dict[str, str] = field(default_factory=dict)
    """Other recipes for some layers, by globs over their names, the first match decides; in TOML a table:
    [float8.layer_recipes] with lines like "layers.*.mlp" = "rowwise". All others get ``recipe``."""
    all_gather: Flag = True
    """Gather the weights as float8 codes."""
    gradients: Flag = False
    """Reduce the gradients as float8 codes and add them in float32, of a run without float8, too:
    f8sub.reduce_gradients_in_float8."""
    keep_swiglu_input: Literal["high_precision", "float8"] = "high_precision"
    """"float8" rounds gate and up, so that compiled code saves a byte of each element for backward; it changes numbers:
    f8sub.keep_swiglu_input_in_float8."""
    attention: Literal["high_precision", "float8", "float8_forward"] = "high_precision"
    """"float8" runs attention over 8192 tokens and more by cuDNN's float8 kernels; "float8_forward": with its backward
    in bf16. It changes numbers: f8sub.attend_in_float8."""
    experts: FlagOrAuto = "auto"
    """Convert the experts of a mixture that are predicted to gain with a rank's micro-batch: docs/experts.md. true
    converts all of them, false none."""
    skip: tuple[str, ...] = ()
    """Globs over the names of layers that stay as they are, besides those that f8sub leaves by itself."""
    skip_defaults: Flag = True
    """Leave the output head, routers of experts and small layers as they are; false converts those, too."""
    backend: Literal["auto", "scaled_mm", "triton", "reference"] = "auto"
    monitor_every: int = 0
    """Measure x, w and dy of each float8 layer in one step of so many, as docs/monitor.md says: rows in numerics.jsonl
    and TensorBoard, pictures of layers by steps at the end. 0 never does."""
    until_step: int = 0
    """The last step in float8. Later steps are trained in ``training.dtype``, bitwise as in a run that is resumed from
    this step without float8: layers, attention and gradients. 0: all steps are in float8."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """torch.compile, block by block, and the whole step as a CUDA graph."""

    enabled: Flag = False
    """Compile each block, and the loss."""
    cuda_graph: FlagOrAuto = "auto"
    """Capture a step by f8sub.graph_step and replay it; "auto": on GPUs, unless training.dtype is float16, whose loss
    scale the host reads."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """Recompute a part of each block's forward in backward instead of keeping its activations."""

    mode: Literal["none", "selective", "full"] = "none"
    """"selective" keeps the results of attention and of every second product, f8sub.checkpoint_policy(); "full"
    keeps the input of each block alone."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Whole states to resume from, in ``dump_folder/checkpoints``."""

    interval: int = 0
    """Save after so many steps and at the end; 0 saves only when SIGTERM or SIGINT stops the job."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """"async": the files are written while training goes on, from a copy of the tensors on the host."""
    keep_latest_k: int = 0
    """Older whole checkpoints are deleted; 0 keeps all."""
    resume: str = ""
    """"newest": the newest whole checkpoint, or a fresh start where there is none yet. A name such as
    step-00000100: that one. Empty: a fresh start."""


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Loss on the documents kept aside."""

    interval: int = 50
    """Evaluate after so many steps and at the end; 0 never does."""
    batches: int = 4


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What is shown and written while training."""

    log_interval: int = 10
    """Print a line after so many steps where there is no terminal for the progress bar."""
    tensorboard: Flag = True


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Pretrain a Llama or a Qwen3-MoE, in float8 or not, under FSDP2."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LrScheduler = field(default_factory=LrScheduler)
    training: Training = field(default_factory=Training)
    float8: Float8 = field(default_factory=Float8)
    compile: Compile = field(default_factory=Compile)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    eval: Eval = field(default_factory=Eval)
    metrics: Metrics = field(default_factory=Metrics)
    compare: Literal["", "bf16", "gradients"] = ""
    """"bf16": train once in float8 and once in bf16, on the same data from the same seed, and plot both losses.
    "gradients": train as set, with gradients reduced in float32, then in bfloat16, then in float8."""

    @property
    def float8_recipe(self) -> str:
        """The recipe in use; empty for a run without float8."""
        return self.float8.recipe if self.float8.enabled else ""

    @property
    def uses_float8(self) -> bool:
        """Whether anything is in float8: layers by a recipe, or gradients on the wire."""
        return bool(self.float8_recipe) or self.float8.gradients

    def float8_ended(self, step: int) -> bool:
        """Whether all steps after this one are trained without float8."""
        return 0 < self.float8.until_step <= step

    def without_float8(self) -> Settings:
        """Give these settings with all of float8 off."""
        off = dataclasses.replace(self.float8, enabled=False, gradients=False)
        return dataclasses.replace(self, float8=off)


def parse(args: Sequence[str] | None = None) -> Settings:
    """Read the TOML file that ``--job.config_file`` names, then the rest of the command line over it.

    Args:
        args: The command line without the program; ``sys.argv[1:]`` when None.

    Returns:
        Settings whose every value was checked.

    Raises:
        SettingsError: If the file has a key that does not exist or a value of the wrong type, or if a value
            is out of range.
        SystemExit: If the command line has an option that does not exist (the message names it).
    """
    args = list(sys.argv[1:] if args is None else args)
    path = _config_file(args)
    defaults = _from_toml(Path(path)) if path else Settings()
    settings: Settings = tyro.cli(
        Settings,
        args=args,
        default=defaults,
        description="Pretrain a Llama or a Qwen3-MoE, in float8 or not, under FSDP2.",
        config=(tyro.conf.FlagConversionOff,),
        use_underscores=True,
    )
    _check_ranges(settings)
    return settings


def as_dict(settings: Settings) -> dict[str, Any]:
    """Give the settings as nested dicts of plain values, for JSON."""
    return dataclasses.asdict(settings)


def _config_file(args: Sequence[str]) -> str:
    for position, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name.replace("-", "_") == "__job.config_file":
            return value if equals else "".join(args[position + 1 : position + 2])
    return ""


def _from_toml(path: Path) -> Settings:
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"--job.config_file {path}: cannot be read ({error.strerror}).") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--job.config_file {path}: is not TOML ({error}).") from error
    sections = get_type_hints(Settings, include_extras=True)
    values: dict[str, Any] = {}
    for name, content in document.items():
        _check_known(str(path), name, sections)
        if not dataclasses.is_dataclass(sections[name]):
            values[name] = _checked(f"{path}: {name}", content, sections[name])
        elif not isinstance(content, dict):
            raise SettingsError(f"{path}: {name} is a section ([{name}]), but the file gives it {content!r}.")
        else:
            values[name] = _section(f"{path}: [{name}]", sections[name], content)
    return Settings(**values)


def _section(where: str, cls: Any, content: dict[str, Any]) -> Any:
    fields = get_type_hints(cls, include_extras=True)
    for key in content:
        _check_known(where, key, fields)
    return cls(**{key: _checked(f"{where} {key}", value, fields[key]) for key, value in content.items()})


def _check_known(where: str, key: str, known: dict[str, Any]) -> None:
    if key not in known:
        close = difflib.get_close_matches(key, known, n=1)
        advice = f"Did you mean {close[0]!r}?" if close else f"It knows {', '.join(known)}."
        raise SettingsError(f"{where}: unknown key {key!r}. {advice}")


def _checked(where: str, value: Any, annotation: Any) -> Any:
    if annotation == Flag or (annotation == FlagOrAuto and value != AUTO):
        annotation = bool
    if annotation == FlagOrAuto:
        return value
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        if value not in choices:
            raise SettingsError(f"{where} = {value!r}: expected one of {', '.join(map(repr, choices))}.")
        return value
    if get_origin(annotation) is tuple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise SettingsError(f"{where} = {value!r}: expected a list of strings.")
        return tuple(value)
    if get_origin(annotation) is dict:
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise SettingsError(f"{where} = {value!r}: expected a table of strings.")
        return value
    if annotation is float and type(value) is int:
        return float(value)
    if type(value) is not annotation:
        raise SettingsError(
            f"{where} = {value!r}: expected {annotation.__name__}, got {type(value).__name__}."
        )
    return value


def _check_ranges(settings: Settings) -> None:
    minima = {
        "data.eval_every_nth": 2,
        "lr_scheduler.warmup_steps": 0,
        "training.steps": 1,
        "training.seq_len": 1,
        "training.local_batch_size": 1,
        "training.gradient_accumulation_steps": 1,
        "training.max_norm": 0,
        "float8.monitor_every": 0,
        "float8.until_step": 0,
        "checkpoint.interval": 0,
        "checkpoint.keep_latest_k": 0,
        "eval.interval": 0,
        "eval.batches": 1,
        "metrics.log_interval": 1,
        "optimizer.lr": 0,
        "optimizer.weight_decay": 0,
    }
    for name, minimum in minima.items():
        section, key = name.split(".")
        value = getattr(getattr(settings, section), key)
        if not value >= minimum:
            raise SettingsError(f"{name} = {value}: must be at least {minimum}.")
    ratio = settings.lr_scheduler.decay_ratio
    if not 0 <= ratio <= 1:
        raise SettingsError(f"lr_scheduler.decay_ratio = {ratio}: must be between 0 and 1.")
    until, steps = settings.float8.until_step, settings.training.steps
    if until >= steps:
        raise SettingsError(
            f"float8.until_step = {until}: training.steps = {steps} leaves no step after it. Give an earlier step, or "
            "0 to train all steps in float8."
        )
    if settings.compare == "bf16" and not settings.float8_recipe:
        raise SettingsError(
            "--compare bf16 trains in float8 first, but float8 is off (float8.enabled = "
            f"{str(settings.float8.enabled).lower()}, float8.recipe = {settings.float8.recipe!r})."
        )
    if settings.compare == "bf16" and settings.training.dtype != "bfloat16":
        raise SettingsError(
            f"--compare bf16 with training.dtype = {settings.training.dtype!r}: the run beside float8 would "
            "not be bf16. Use --training.dtype bfloat16."
        )
    if settings.compare and settings.checkpoint.resume:
        raise SettingsError(f"--compare {settings.compare} starts new runs: leave checkpoint.resume empty.")
    both = settings.float8.gradients and settings.training.reduce_dtype != "float32"
    if both and settings.compare != "gradients":
        raise SettingsError(
            "float8.gradients = true adds gradients in float32, and training.reduce_dtype = "
            f"{settings.training.reduce_dtype!r} would round the sums: leave one of them out."
        )
