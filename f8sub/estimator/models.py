"""Builds a named model on the meta device: shapes alone, no weights, and nothing is downloaded.

Llama 3's shapes are here by size, for estimates without a forward.
"""

import contextlib
import importlib
import importlib.util
import json
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from f8sub.errors import Float8ConfigError, Float8Warning, nearest, shown

SIZES = {
    "llama3-8b": (32, 4096, 14336, 1024),
    "llama3-70b": (80, 8192, 28672, 1024),
    "llama3-405b": (126, 16384, 53248, 1024),
}
"""Blocks; features of hidden states, of the feed-forward, of keys and of values."""

VOCABULARY = 128256


class Llama3(nn.Module):
    """Has embeddings, blocks with transformers' names, and the output head."""

    def __init__(self, blocks: int, hidden: int, forward: int, keys: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(_block(hidden, forward, keys) for _ in range(blocks))
        self.norm = nn.RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, VOCABULARY, bias=False)


def _block(hidden: int, forward: int, keys: int) -> nn.ModuleDict:
    def linear(features: int, of: int) -> nn.Linear:
        return nn.Linear(of, features, bias=False)

    attention = {"q_proj": linear(hidden, hidden), "k_proj": linear(keys, hidden)}
    attention |= {"v_proj": linear(keys, hidden), "o_proj": linear(hidden, hidden)}
    mlp = {"gate_proj": linear(forward, hidden), "up_proj": linear(forward, hidden)}
    mlp |= {"down_proj": linear(hidden, forward)}
    norms = {"input_layernorm": nn.RMSNorm(hidden), "post_attention_layernorm": nn.RMSNorm(hidden)}
    return nn.ModuleDict({"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp), **norms})


def llama3(name: str) -> Llama3:
    """Build the model of one of ``SIZES`` on meta."""
    with torch.device("meta"):
        return Llama3(*SIZES[name])


TITAN = "torchtitan:"

FORMS = (
    "a folder with config.json, or that file; a name that transformers has cached, or one of its model types, such "
    f"as llama; {TITAN}llama3/llama3_8b; {', '.join(SIZES)}; or module:function"
)
"""What a model is named by."""


def load(name: str) -> torch.nn.Module:
    """Build the model of that name on meta.

    Args:
        name: one of ``FORMS``. A function takes no arguments, and returns a module or a config of torchtitan's trainer.

    Raises:
        Float8ConfigError: there is no such model, or a package that it needs is not installed.
    """
    if name.lower() in SIZES:
        return llama3(name.lower())
    with _quiet():
        if name.startswith(TITAN):
            return _of_function(_of_titan(name.removeprefix(TITAN)), name)
        # A path before a name: what is in the working directory hides a cached model of the same name.
        if Path(name).exists():
            return _of_transformers(_config_of_path(Path(name)), name)
        if ":" in name:
            return _of_function(_function(name), name)
        return _of_transformers(_config_of_name(name), name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what libraries log when they are imported, such as kernels that they cannot load."""
    # A program may have a limit of its own: it comes back afterwards.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _imported(module: str, why: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        known = package in ("transformers", "torchtitan")
        todo = f"pip install {package}" if known else "call f8sub where python finds it, or set PYTHONPATH"
        raise Float8ConfigError(
            f"{why} needs the module {module}: {error}; {todo}, or name another model"
        ) from error


def _function(name: str) -> Callable[[], Any]:
    module, _, function = name.partition(":")
    found = getattr(_imported(module, f"{name!r}"), function, None)
    if not callable(found):
        raise Float8ConfigError(f"{module} has no function {function!r}; a model is {FORMS}")
    made: Callable[[], Any] = found
    return made


def _of_titan(name: str) -> Callable[[], Any]:
    module, _, config = name.partition("/")
    if not config:
        raise Float8ConfigError(f"a config of torchtitan is {TITAN}MODULE/CONFIG, got {name!r}")
    _imported("torchtitan", f"{TITAN}{name}")
    registry = f"torchtitan.models.{module}.config_registry"
    recipes = f"torchtitan_recipes.models.{module}"  # after 0.3
    with contextlib.suppress(ModuleNotFoundError):
        registry = recipes if importlib.util.find_spec(recipes) else registry
    return _function(f"{registry}:{config}")


def _of_function(function: Callable[[], Any], name: str) -> torch.nn.Module:
    with torch.device("meta"):
        try:
            made = function()
        except Exception as error:  # whatever a user's function raises
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise Float8ConfigError(
                f"{name}, called without arguments on the meta device, raised {type(error).__name__}: {error} "
                f"({at.filename}:{at.lineno})"
            ) from error
        if not isinstance(made, torch.nn.Module):
            config: Any = getattr(
                getattr(made, "model_spec", made), "model", None
            )  # after 0.3 the trainer's own
            made = config.build() if hasattr(config, "build") else made
    if not isinstance(made, torch.nn.Module):
        raise Float8ConfigError(f"{name} returned {shown(made)}, neither a module nor a torchtitan config")
    return made


def _config_of_path(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise Float8ConfigError(f"{path} has no config.json; a model is {FORMS}")
    transformers = _imported("transformers", f"{file}")
    try:
        values = json.loads(file.read_text())
        # Checked here, so that the error names the nearest types.
        kind = values.get("model_type")
        if kind not in transformers.CONFIG_MAPPING:
            near = ", ".join(nearest(str(kind), transformers.CONFIG_MAPPING))
            raise ValueError(f"it knows no model_type {kind!r}" + (f" (nearest: {near})" if near else ""))
        return transformers.AutoConfig.for_model(**values)
    except Exception as error:  # each class of configs checks its values in its own way
        raise _unread(file, error) from error


def _config_of_name(name: str) -> Any:
    transformers = _imported("transformers", f"{name!r}")
    kinds = transformers.CONFIG_MAPPING
    if name.lower() in kinds:
        warnings.warn(
            f"{name} is a type of models, and this is its default configuration in transformers, which may be no "
            "published model; name a folder with config.json, or a model that transformers has cached",
            Float8Warning,
            stacklevel=5,
        )
        return kinds[name.lower()]()
    try:
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        near = ", ".join(nearest(name, [*SIZES, *kinds]))
        told = f" (nearest: {near})" if near else ""
        raise Float8ConfigError(
            f"no model {name!r} on this machine{told}, and nothing is downloaded (hf download NAME config.json does "
            f"that); a model is {FORMS}"
        ) from error
    except Exception as error:  # as above, of a config that is cached
        raise _unread(name, error) from error


def _unread(name: object, error: Exception) -> Float8ConfigError:
    return Float8ConfigError(f"{name} is no config that transformers reads: {' '.join(str(error).split())}")


def _of_transformers(config: Any, name: str) -> torch.nn.Module:
    transformers = _imported("transformers", f"{name!r}")
    named = [getattr(transformers, each, None) for each in getattr(config, "architectures", None) or ()]
    autos = [transformers.AutoModelForCausalLM, transformers.AutoModel]
    if getattr(config, "is_encoder_decoder", False):
        autos = [transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForSpeechSeq2Seq, *autos]
    # The architectures that the config names come first.
    builders = [cls._from_config for cls in named if cls is not None] + [auto.from_config for auto in autos]
    problem: Exception | None = None
    with torch.device("meta"):
        for build in builders:
            try:
                model: torch.nn.Module = build(config)
                return model
            except Exception as error:  # sizes that fit nothing fail where a model first computes with them
                problem = problem or error
    why = " ".join(f"{type(problem).__name__}: {problem}".split())
    raise Float8ConfigError(f"transformers builds no model of {name}: {why}") from problem
