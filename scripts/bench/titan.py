"""Tokens per second and memory of torchtitan 0.2 with f8sub, as torchtitan itself tells them.

Each arm is a run of torchtitan's command line: torchrun, FSDP2 over all GPUs, selective activation checkpointing, Llama
3 8B's dimensions at 8192 tokens. Figures are medians over the windows of steps that torchtitan logs to TensorBoard, the
first ones, in which it compiles, left out; text and tokenizer are made of the standard library's sources. An arm that
fails is left out, and the exit status is 1. Options that are not this script's are torchtitan's.

    python scripts/bench/titan.py --gpus 2 --flavor 8B-8 --json torchtitan.json
    python scripts/bench/titan.py --arms "bf16 compiled" "f8sub delayed compiled" --activation_checkpoint.mode=full
    python scripts/bench/titan.py --model.name=qwen3 --flavor 30B-A3B-4 --sequences 2 --arms "bf16 compiled" \
        "f8sub tensorwise experts compiled" "torchao experts compiled"
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from scripts.bench import jobs
from scripts.bench.timing import machine, version_of
from scripts.loss_compare import read_tensorboard
from scripts.table import ROOT, Table, parser, progress, write_json

F8SUB = ("--job.custom_config_module=f8sub.titan", "--model.converters=f8sub")
PEER_BY_NAME = (
    "--model.converters=quantize.linear.float8",
    "--quantize.linear.float8.filter_fqns=output",
)
PEER = (
    *PEER_BY_NAME,
    "--quantize.linear.float8.enable_fsdp_float8_all_gather",
    "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
)
COMPILED = ("--compile.enable",)
PEER_EXPERTS = ("--model.converters=quantize.linear.float8,torchao_experts", *PEER[1:])
EXPERTS = (*F8SUB, "--f8sub.experts=true")
ARMS: dict[str, tuple[str, ...]] = {
    "bf16 compiled": COMPILED,
    "f8sub tensorwise compiled": (*F8SUB, *COMPILED),
    "torchao tensorwise compiled": (*PEER, *COMPILED),
    "f8sub delayed compiled": (*F8SUB, "--f8sub.recipe_name=delayed", *COMPILED),
    "f8sub tensorwise eager": F8SUB,
    "f8sub rowwise compiled": (*F8SUB, "--f8sub.recipe_name=rowwise", *COMPILED),
    "f8sub blockwise compiled": (*F8SUB, "--f8sub.recipe_name=blockwise", *COMPILED),
    "torchao rowwise compiled": (*PEER_BY_NAME, "--quantize.linear.float8.recipe_name=rowwise", *COMPILED),
    "f8sub gridquant compiled": (*F8SUB, "--f8sub.recipe_name=gridquant", *COMPILED),
    "f8sub delayed eager": (*F8SUB, "--f8sub.recipe_name=delayed"),
    "bf16 eager": (),
    "f8sub tensorwise experts compiled": (*EXPERTS, *COMPILED),
    "f8sub rowwise experts compiled": (*EXPERTS, "--f8sub.recipe_name=rowwise", *COMPILED),
    "torchao experts compiled": (*PEER_EXPERTS, *COMPILED),
}
"""What each adds to torchtitan's options; torchtitan's own converter is torchao's. The last three are for mixtures."""
MIXTURES = tuple(arm for arm in ARMS if "experts" in arm)

METRICS = {
    "tokens_per_second": "throughput(tps)",
    "mfu_percent": "mfu(%)",
    "reserved_gib": "memory/max_reserved(GiB)",
    "active_gib": "memory/max_active(GiB)",
    "loss": "loss_metrics/global_avg_loss",
}
"""torchtitan's names."""


def parsed(description: str | None = __doc__) -> argparse.Namespace:
    """The options of this script, and of others that run its arms."""
    made = options(description)
    dense = [arm for arm in ARMS if arm not in MIXTURES]
    made.add_argument("--arms", nargs="+", choices=ARMS, default=dense)
    return checked(made)


def options(description: str | None) -> argparse.ArgumentParser:
    """The options that every script has that runs torchtitan."""
    made = parser(description)
    gpus = torch.cuda.device_count()
    made.add_argument("--gpus", type=int, default=gpus, help="ranks; all GPUs by default")
    flavors = "8B, 8B-1 to 8B-16 of fewer layers, any of torchtitan's; 30B-A3B-4 with --model.name=qwen3"
    made.add_argument("--flavor", default="8B-8", help=flavors)
    made.add_argument("--tokens", type=int, default=8192, help="a sequence")
    made.add_argument("--sequences", type=int, default=1, help="a GPU")
    made.add_argument("--steps", type=int, default=25)
    made.add_argument("--window", type=int, default=5, help="steps between lines of torchtitan's log")
    made.add_argument("--skip", type=int, default=10, help="steps before the first that counts")
    made.add_argument("--program", default="torchtitan.train", help="a module with torchtitan's command line")
    return made


def checked(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line; what it has besides is ``more``, torchtitan's."""
    arguments, arguments.more = made.parse_known_args()
    if arguments.steps < arguments.skip + arguments.window:
        made.error("--steps is at least --skip and a --window")
    return arguments


def command(arguments: argparse.Namespace, arm: str, folder: Path) -> list[str]:
    """What is run for an arm; options of torchtitan's that this script was given come last and win."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc_per_node={arguments.gpus}", "-m", arguments.program),
        *(
            "--experimental.custom_import=scripts.bench.gpu.titan_layers",
            f"--model.flavor={arguments.flavor}",
        ),
        *(f"--model.hf_assets_path={folder}/tokenizer", "--training.dataset=c4_test"),
        *(f"--training.dataset_path={folder}/data", f"--job.dump_folder={folder}/run"),
        *(f"--training.seq_len={arguments.tokens}", f"--training.local_batch_size={arguments.sequences}"),
        *(f"--training.steps={arguments.steps}", f"--metrics.log_freq={arguments.window}"),
        *("--metrics.enable_tensorboard", f"--metrics.save_tb_folder={arm.replace(' ', '_')}"),
        *("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"),
        *("--debug.seed=0", *ARMS[arm], *arguments.more),
    ]


def figures_of(folder: Path, skip: int) -> dict[str, Any]:
    """Medians over what was logged after ``skip`` steps; of the loss, all that was logged, by its step."""
    logged = read_tensorboard(folder, METRICS.values())
    series = {
        name: {step: value for step, value in logged[tag].items() if step > skip}
        for name, tag in METRICS.items()
    }
    if missing := [METRICS[name] for name, values in series.items() if not values]:
        raise ValueError(f"{folder}: nothing by the name {missing[0]} after step {skip}")
    found = {name: statistics.median(values.values()) for name, values in series.items()}
    speeds, losses = series["tokens_per_second"].values(), logged[METRICS["loss"]]
    ends = {"loss": losses[max(losses)], "first_loss": losses[min(losses)], "loss_step": max(losses)}
    return {**found, **ends, "slowest": min(speeds), "fastest": max(speeds), "losses": losses}


def run(arguments: argparse.Namespace, arm: str, folder: Path) -> dict[str, Any]:
    """Train one arm; an error has the end of what torchtitan said."""
    done = jobs.run(command(arguments, arm, folder), cwd=ROOT)
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-120:]))
    return figures_of(folder / "run" / arm.replace(" ", "_"), arguments.skip)


def table(arguments: argparse.Namespace, found: dict[str, dict[str, Any]], where: str) -> Table:
    """The arms; ratios are to compiled bf16."""
    bf16 = found.get("bf16 compiled", {}).get("tokens_per_second")
    rows = [(arm, {**of, "over_bf16": bf16 and of["tokens_per_second"] / bf16}) for arm, of in found.items()]
    title = (
        f"torchtitan {version_of('torchtitan')}, {arguments.gpus} x {where}: {arguments.flavor}, "
        f"{arguments.sequences} x {arguments.tokens} tokens per GPU"
    )
    columns = (
        ("tokens/s and GPU", "{tokens_per_second:,.0f} ({slowest:,.0f} to {fastest:,.0f})"),
        ("over bf16", "{over_bf16:.2f}"),
        ("MFU", "{mfu_percent:.1f} %"),
        ("GiB active / reserved", "{active_gib:.1f} / {reserved_gib:.1f}"),
        ("last loss that was logged", "{loss:.3f}, step {loss_step}"),
    )
    return Table.of(title, rows, columns)


def main() -> None:
    from tests.integrations.torchtitan.gloo import make_assets

    arguments = parsed()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    about = {**machine(device), "torchtitan": version_of("torchtitan"), "options": vars(arguments)}
    with tempfile.TemporaryDirectory() as temporary, progress() as begin:
        folder = Path(temporary)
        make_assets(0, 1, folder)
        for arm in arguments.arms:
            begin(arm)
            try:
                found[arm] = run(arguments, arm, folder)
            except (RuntimeError, ValueError) as error:
                failed[arm] = str(error)
            if arguments.json:
                write_json(arguments.json, {"about": about, "figures": found, "failed": failed})
            print(f"{arm}: {found.get(arm, 'failed')}", file=sys.stderr, flush=True)
    table(arguments, found, about["device"]).show()
    for arm, error in failed.items():
        print(f"FAILED {arm}: {error}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
