"""Jobs of torchtitan 0.2 for tests, on CPUs and on GPUs: arms and their TOML.

Nothing here imports torchtitan before a rank runs it.
"""

import copy
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LAYERS = 2
"""Of the debug model's six."""

JOB = """
[job]
dump_folder = "{folder}"
custom_config_module = "f8sub.titan"
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "{folder}/tokenizer"
{model}
[optimizer]
lr = 8e-4
[lr_scheduler]
warmup_steps = 2
[metrics]
log_freq = 1
[training]
dataset = "c4_test"
dataset_path = "{folder}/data"
local_batch_size = 2
seq_len = 128
steps = 5
[activation_checkpoint]
mode = "none"
[checkpoint]
interval = 3
last_save_model_only = false
[debug]
seed = 0
{sections}
"""
PEER = """
[quantize.linear.float8]
emulate = {emulate}
enable_fsdp_float8_all_gather = true
precompute_float8_dynamic_scale_for_fsdp = true
filter_fqns = ["output"]
"""
ARMS = {
    "bf16": ("", ""),
    "f8sub": ('converters = ["f8sub"]', "[f8sub]\nemulate = {emulate}"),
    "peer": ('converters = ["quantize.linear.float8"]', PEER),
}
"""What a job's TOML has in its section of the model, and besides; the peer is torchtitan's own converter."""


def job_file(arm: str, folder: Path, more: str = "", *, emulate: bool = True) -> Path:
    """A job's TOML; ``more`` follows at its end, in the section of the arm."""
    model, sections = ARMS[arm]
    sections = sections.format(emulate=str(emulate).lower())
    file = folder / f"{arm}-{os.getpid()}.toml"  # each rank its own
    file.write_text(JOB.format(folder=folder, model=model, sections=f"{sections}\n{more}"))
    return file


def configured(arguments: list[str], folder: Path, *, emulate: bool = True) -> Any:
    """An arm's config, parsed as on the command line.

    Of arguments as ``cpu.configured`` of torchtitan 0.3 takes them; options of the command line go as they are.
    """
    from torchtitan.config import ConfigManager

    name, _, given = arguments[0].partition(":")
    if mixture := name.endswith("moe"):
        name = name.removesuffix("moe").rstrip("_") or "bf16"
    arm, _, checkpointed = name.partition("_")
    options = [f"--f8sub.{key}={value}" for key, value in json.loads(given or "{}").items()]
    options += [word for option in arguments[1:] for word in spelled(option)]
    if mixture:
        options += ["--model.name=qwen3", "--model.flavor=debugmodel_moe"]
    if checkpointed:
        options.append(f"--activation_checkpoint.mode={checkpointed.removesuffix('_ac')}")
        options.append("--activation_checkpoint.selective_ac_option=op")
    file = job_file(arm, folder, emulate=emulate)
    return ConfigManager().parse_args([f"--job.config_file={file}", *options])


def spelled(option: str) -> list[str]:
    """``section.field=value``, whose value is JSON, as on the command line of torchtitan 0.2."""
    if option.startswith("--"):
        return [option]
    path, _, text = option.partition("=")
    value = json.loads(text)
    said = [f"--{path}"] if value is True else [f"--{path}={value}"]
    # Compiled is the model alone, as in the configs of the tests of 0.3.
    return [*said, "--compile.components=model"] if path == "compile.enable" else said


def with_few_layers(parallelize: Callable[[Any], Any] = lambda parallelize: parallelize) -> None:
    """Have this process's debug models be of ``LAYERS`` layers, and sharded by ``parallelize`` of theirs."""
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    for name, flavor in (("llama3", "debugmodel"), ("qwen3", "debugmodel_moe")):
        stock = get_train_spec(name)
        model_args = copy.deepcopy(stock.model_args)
        args = model_args[flavor]
        args.n_layers = LAYERS
        if args.__dict__.get("moe_enabled"):
            args.hidden_dim, args.moe_inter_dim = 256, 256
            args.moe_args.num_experts, args.moe_args.top_k = 8, 2
            args.moe_args.use_grouped_mm = torch.cuda.is_available()  # of torch's there is none on CPUs
        spec = dataclasses.replace(
            stock, model_args=model_args, parallelize_fn=parallelize(stock.parallelize_fn)
        )
        register_train_spec(name, spec)
