"""torchtitan 0.2 on CPUs and gloo: as a script, its command line (``torchrun -m tests.titan.cpu_0_2 --job.config_file
...``); for the tests, runs in forked ranks. It binds its device by name in many modules, so that these are told.

Importing this changes what torchtitan believes the device to be: nothing imports it but ranks.
"""

import copy
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from tests.titan import gloo  # first: it sets what the others read when they are imported

# isort: split
import torchtitan.train
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.tools.logging import init_logger

LAYERS = 2
"""Of the debug model's six."""

device = gloo.CpuDevice("cpu_device")
for name, module in list(sys.modules.items()):
    if name.startswith("torchtitan"):
        for known, value in (("device_type", "cpu"), ("device_module", device)):
            if hasattr(module, known):
                setattr(module, known, value)
torchtitan.train.time = gloo.without_sleep(torchtitan.train.time)

stock = get_train_spec("llama3")
model_args = copy.deepcopy(stock.model_args)
model_args["debugmodel"].n_layers = LAYERS
register_train_spec(
    "llama3",
    dataclasses.replace(stock, model_args=model_args, parallelize_fn=gloo.with_sums(stock.parallelize_fn)),
)

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
emulate = true
enable_fsdp_float8_all_gather = true
precompute_float8_dynamic_scale_for_fsdp = true
filter_fqns = ["output"]
"""
ARMS = {
    "bf16": ("", ""),
    "f8sub": ('converters = ["f8sub"]', "[f8sub]\nemulate = true"),
    "peer": ('converters = ["quantize.linear.float8"]', PEER),
}
"""What a job's TOML has in its section of the model, and besides; the peer is torchtitan's own converter."""


def job_file(arm: str, folder: Path, more: str = "") -> Path:
    """A job's TOML; ``more`` follows at its end, in the section of the arm."""
    model, sections = ARMS[arm]
    file = folder / f"{arm}-{os.getpid()}.toml"  # each rank its own
    file.write_text(JOB.format(folder=folder, model=model, sections=f"{sections}\n{more}"))
    return file


def configured(arguments: list[str], folder: Path) -> Any:
    """An arm's config, parsed as on the command line.

    Args:
        arguments: the arm; then options of torchtitan's command line.
        folder: where a run takes its assets from and leaves everything.
    """
    arm, *options = arguments
    return ConfigManager().parse_args([f"--job.config_file={job_file(arm, folder)}", *options])


def trainer_of(rank: int, arguments: list[str], folder: Path) -> Any:
    gloo.as_rank(rank, folder)
    init_logger()
    return torchtitan.train.Trainer(configured(arguments, folder))


if __name__ == "__main__":
    torchtitan.train.main(torchtitan.train.Trainer)
