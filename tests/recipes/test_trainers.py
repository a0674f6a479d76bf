"""The scripts of recipes/trainers: float8 on the wire, and through a checkpoint in the middle of training, the bits of
a plain FSDP2 loop that was not interrupted."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import accelerate_fsdp2
import hf_trainer
import lightning_fsdp2
import plain_loop
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from f8sub_example import Tokens, build_model
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import f8sub
from tests.models import BF16, update
from tests.selection import long_but

# Accelerate keeps its state for the process.
pytestmark = pytest.mark.own_ranks

Weights = dict[str, torch.Tensor]
STEPS = 1
"""Before the checkpoint, and again after it."""


class Record:
    """What the models of one kind of trainer were given and returned, and what this rank sent meanwhile."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.gathered: list[int] = []
        self.amax_all_reduces = 0

    def of_forward(self, model: Any, args: Any, batch: dict[str, Any], output: Any) -> None:
        self.batches.append(batch)
        self.losses.append(output.loss.item())

    def of(self, model: torch.nn.Module) -> torch.nn.Module:
        model.register_forward_hook(self.of_forward, with_kwargs=True)
        return model


@contextmanager
def recorded(script: ModuleType, *, empty: bool = False) -> Iterator[Record]:
    """A Record of every model that the script makes in the ``with`` block; ``empty``: of zeros, on this rank."""
    record = Record()

    def build_watched() -> torch.nn.Module:
        model = record.of(build_model())
        with torch.no_grad():
            for parameter in model.parameters() if empty else ():
                parameter.zero_()
        return model

    def all_gather_call(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        record.gathered.append(output.numel() * output.element_size())
        return gather(output, *args, **kwargs)

    def all_reduce_call(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        record.amax_all_reduces += op == dist.ReduceOp.MAX
        return reduce(tensor, op, *args, **kwargs)

    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, reduce = getattr(dist, name), dist.all_reduce
    with (
        mock.patch.object(script, "build_model", build_watched),
        mock.patch.object(dist, name, all_gather_call),
        mock.patch.object(dist, "all_reduce", all_reduce_call),
    ):
        yield record


def weights_of(model: torch.nn.Module, read: Callable[..., Any] = DTensor.to_local) -> Weights:
    """Copies in the host's memory, where checkpoints are read to."""
    state = model.state_dict()
    return {name: (read(v) if isinstance(v, DTensor) else v).clone().cpu() for name, v in state.items()}


def uninterrupted(batches: list[Any], policy=BF16, batches_a_step=1, **options) -> tuple[list, Weights]:
    """Losses and weights of a plain FSDP2 loop over the same batches."""
    record = Record()
    model: Any = f8sub.convert_to_float8(record.of(build_model()), recipe="tensorwise")
    model.to(batches[0]["input_ids"].device)
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True, **options)
    f8sub.precompute_scales(model)
    for index, batch in enumerate(batches, 1):
        last = index % batches_a_step == 0
        model.set_requires_gradient_sync(last)
        loss = model(**batch).loss
        # The Trainer of transformers divides by the tokens of all ranks, and FSDP2 by the ranks.
        shared = dist.get_world_size() if batch.get("num_items_in_batch") is not None else 1
        (loss * shared / batches_a_step).backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update(model, optimizer)
    return record.losses, weights_of(model)


def check_wire(record: Record, model: Any, more: int = 0) -> None:
    """Each block is gathered with 1 byte an element of its linear weights and 2 of its norms.

    There is one amax all-reduce at the beginning and after the checkpoint, one a step, and ``more``: torch makes a step
    of learning rate 0 for the states that it then loads, which a hook follows too, and a model that is prepared before
    it is loaded has its scales computed twice.
    """
    block = model.model.layers[0]
    linear = sum(m.weight.numel() for m in block.modules() if isinstance(m, f8sub.Float8Linear))
    others = sum(p.numel() for p in block.parameters()) - linear
    assert linear > 100 * others > 0
    in_float8 = record.gathered.count(linear + 2 * others)
    assert in_float8 == 2 * len(model.model.layers) * len(record.batches), record.gathered
    assert linear * 2 + 2 * others not in record.gathered
    assert record.amax_all_reduces == 2 * (STEPS + 1) + more


def check_same(record: Record, model: torch.nn.Module, **options: Any) -> None:
    losses, weights = uninterrupted(record.batches, **options)
    assert len(set(losses)) == len(losses)
    assert record.losses == losses
    found = weights_of(model)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(found[name], weight), name


def check_plain(sharded: Path, key: str | None, expected: Weights) -> None:
    """A checkpoint of torch.distributed.checkpoint holds these tensors and no class of f8sub's."""
    whole = sharded.parent / "whole.pt"
    dcp_to_torch_save(sharded, whole)
    state = torch.load(whole, weights_only=True)
    state = state if key is None else state[key]
    names = {name: name if name in state else f"model.{name}" for name in expected}
    for name, weight in expected.items():
        assert type(state[names[name]]) is torch.Tensor
        assert torch.equal(state[names[name]], weight), name


def as_torchrun_would(rank: int, world: int) -> None:
    of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    of_job = {"GROUP_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in {**of_rank, **of_job}.items()})
    os.environ["TORCHELASTIC_RUN_ID"] = "test"


def plainly(rank: int, world: int, folder: str) -> Weights:
    with recorded(plain_loop) as record:
        first = plain_loop.PlainLoop()
        first.train(STEPS)
        first.save(f"{folder}/dcp")
        saved = weights_of(first.model, DTensor.full_tensor)
        second = plain_loop.PlainLoop()
        second.batches = first.batches
        second.load(f"{folder}/dcp")
        second.train(STEPS)
    check_wire(record, second.model)
    check_same(record, second.model)
    return saved


def let_accelerate_shard_on_cpus() -> None:
    """It has FSDP for accelerators only, and asks for no more than their name."""
    if torch.cuda.is_available():
        return
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def accelerated(rank: int, world: int, folder: str, options: dict[str, Any]) -> Weights:
    as_torchrun_would(rank, world)
    let_accelerate_shard_on_cpus()
    with recorded(accelerate_fsdp2, empty=rank > 0 and "cpu_ram_efficient_loading" in options) as record:
        plugin = accelerate_fsdp2.fsdp_plugin(**options)
        given = {"mixed_precision": "bf16", "gradient_accumulation_steps": 2, "fsdp_plugin": plugin}
        accelerator = Accelerator(cpu=not torch.cuda.is_available(), **given)
        assert accelerator.is_fsdp2
        first = accelerate_fsdp2.AccelerateLoop(accelerator)
        first.train(2 * STEPS)
        accelerator.save_state(folder)
        saved = weights_of(first.model, DTensor.full_tensor)
        accelerator.free_memory()
        second = accelerate_fsdp2.AccelerateLoop(accelerator)
        second.batches = first.batches
        accelerator.load_state(folder)
        second.train(2 * STEPS)
    check_wire(record, second.model, 2)
    check_same(record, second.model, batches_a_step=2)
    return saved


LOADING = {"cpu_ram_efficient_loading": True}
OPTIONS = [LOADING, {}, {**LOADING, "state_dict_type": "FULL_STATE_DICT"}]


def check_accelerate(run: Callable[..., list[Weights]], folder: Path, options: dict[str, Any]) -> None:
    saved = run(2, accelerated, str(folder), options)[0]
    if "state_dict_type" not in options:
        check_plain(folder / "pytorch_model_fsdp_0", "model", saved)
        return
    state = torch.load(folder / "pytorch_model_fsdp.bin", weights_only=True)
    assert {type(value) for value in state.values()} == {torch.Tensor}
    assert all(torch.equal(state[name], value) for name, value in saved.items())


@pytest.mark.parametrize(
    "options", long_but([LOADING], OPTIONS), ids=["by-rank-0", "as-default", "full-state"]
)
def test_accelerate(ranks, tmp_path, options):
    check_accelerate(ranks, tmp_path, options)


def started(rank: int, world: int) -> str:
    as_torchrun_would(rank, world)
    try:
        accelerate_fsdp2.main()
    except SystemExit as stopped:
        return str(stopped)
    return ""


def test_accelerate_that_does_not_shard_stops_before_it_trains(ranks):
    assert "every rank would train a whole model by itself" in ranks(2, started)[0]


def by_trainer(rank: int, world: int, folder: str) -> Weights:
    as_torchrun_would(rank, world)
    with recorded(hf_trainer) as record:

        def trainer_of(steps: int) -> Any:
            more = {"max_steps": steps, "save_steps": STEPS, "lr_scheduler_type": "constant"}
            more |= {"use_cpu": not torch.cuda.is_available(), "disable_tqdm": True}
            options = hf_trainer.arguments(folder, **more)
            let_accelerate_shard_on_cpus()
            return hf_trainer.build_trainer(options)

        first = trainer_of(STEPS)
        first.train()
        saved = weights_of(first.model, DTensor.full_tensor)
        second = trainer_of(2 * STEPS)
        second.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS}")
    check_wire(record, second.model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    check_same(record, second.model, policy=policy, weight_decay=0.0)
    return saved


def by_lightning(rank: int, world: int, folder: str) -> Weights:
    as_torchrun_would(rank, world)
    with recorded(lightning_fsdp2) as record:

        def trainer_of(steps: int) -> Any:
            quiet = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")
            return lightning_fsdp2.build_trainer(folder, max_steps=steps, **dict.fromkeys(quiet, False))

        first, trainer = lightning_fsdp2.Module(), trainer_of(STEPS)
        trainer.fit(first, DataLoader(Tokens(), batch_size=8))
        trainer.save_checkpoint(f"{folder}/saved.ckpt")
        saved = weights_of(first.model, DTensor.full_tensor)
        second, trainer = lightning_fsdp2.Module(), trainer_of(2 * STEPS)
        trainer.fit(second, DataLoader(Tokens(), batch_size=8), ckpt_path=f"{folder}/saved.ckpt")
    check_wire(record, second.model)
    check_same(record, second.model)
    return saved


TRAINERS = {
    "plain": (plainly, "dcp", "model"),
    "transformers": (by_trainer, f"checkpoint-{STEPS}/pytorch_model_fsdp_0", "model"),
    "lightning": (by_lightning, "saved.ckpt", "state_dict"),
}
"""What trains, and where its checkpoint is, under which key."""


def check_trainer(run: Callable[..., list[Weights]], folder: Path, name: str) -> None:
    body, saved_at, key = TRAINERS[name]
    saved = run(2, body, str(folder))[0]
    check_plain(folder / saved_at, key, saved)


@pytest.mark.parametrize("name", TRAINERS)
def test_the_bits_of_a_plain_loop_and_a_checkpoint_of_plain_tensors(ranks, tmp_path, name):
    check_trainer(ranks, tmp_path, name)
