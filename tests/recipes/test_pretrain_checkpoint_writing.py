"""Checkpoints on their way to the disk: in the background, and where they cannot be written."""

import errno
import json
import threading

import checkpoint
import pytest
import torch
from checkpoint import MANIFEST, CheckpointError, Checkpoints
from torch.distributed.checkpoint import FileSystemWriter

from tests.recipes.test_pretrain_checkpoint import STATE, load, save, some_tensors

ASYNCHRONOUS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def digests(folder, step):
    return json.loads((folder / f"step-{step:08d}" / MANIFEST).read_text())["files"]


def test_in_the_background_the_same_files_are_written(ranks, tmp_path):
    ranks(3, save, tmp_path / "sync", [1, 2])
    ranks(3, save, tmp_path / "async", [1, 2], 0, True)
    tensors = {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "state.json"}
    for step in (1, 2):
        expected, found = digests(tmp_path / "sync", step), digests(tmp_path / "async", step)
        assert set(found) == set(expected) == tensors | {".metadata"}
        assert all(found[name] == expected[name] for name in tensors)
    assert ranks(3, load, tmp_path / "async", "step-00000002") == ranks(
        3, load, tmp_path / "sync", "step-00000002"
    )


def hold(event):
    """Let no rank's tensors reach the disk before the event."""
    write_data = FileSystemWriter.write_data

    def held(self, *args, **kwargs):
        event.wait()
        return write_data(self, *args, **kwargs)

    FileSystemWriter.write_data = held


def train_on_while_it_is_written(rank, world, folder):
    """What is the newest whole checkpoint while one is written; the tensors change in the meantime."""
    Checkpoints(folder).save(1, some_tensors(world, 1), STATE)
    released = threading.Event()
    hold(released)
    checkpoints = Checkpoints(folder, keep_latest_k=1, asynchronous=True)
    tensors = some_tensors(world, 2)
    checkpoints.save(2, tensors, STATE)  # which would not return if it waited for the disk
    for tensor in tensors.values():
        tensor.zero_()
    meanwhile, broken = checkpoints.newest_whole()
    released.set()
    checkpoints.wait()
    return (
        meanwhile,
        "cut short" in broken["step-00000002"],
        checkpoints.names(),
        load(rank, world, folder, "step-00000002"),
    )


def test_training_goes_on_while_a_checkpoint_is_written(ranks, tmp_path):
    """It is whole when its manifest is there and not before; the older one is kept until then."""
    for meanwhile, cut_short, names, loaded in ranks(2, train_on_while_it_is_written, tmp_path / "a"):
        assert meanwhile == "step-00000001"
        assert cut_short
        assert names == ["step-00000002"]
        state, tensors = loaded
        assert state == STATE
        assert tensors["sharded"] == torch.randn(7, 3, generator=torch.Generator().manual_seed(2)).tolist()


def full_disk(rank, world, folder, where, asynchronous):
    """What every rank is told when the last rank's disk is full, or rank 0's where only that writes."""

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = Checkpoints(folder, asynchronous=asynchronous)
    checkpoints.save(1, some_tensors(world, 1), STATE)
    checkpoints.wait()
    kept = {name: getattr(checkpoint, name) for name in ("_digest", "_write_at_once", "_remove")}
    write_data = FileSystemWriter.write_data
    if rank == (world - 1 if where in ("write_data", "_digest") else 0):
        setattr(FileSystemWriter if where == "write_data" else checkpoint, where, fail)
    message = ""
    try:
        checkpoints.save(2, some_tensors(world, 2), STATE)
        checkpoints.wait()
    except CheckpointError as error:
        message = str(error)
    FileSystemWriter.write_data = write_data
    for name, function in kept.items():
        setattr(checkpoint, name, function)
    found = checkpoints.newest_whole()[0]
    checkpoints.save(2, some_tensors(world, 2), STATE)
    checkpoints.wait()
    return message, found, checkpoints.newest_whole()[0]


@ASYNCHRONOUS
@pytest.mark.parametrize("where", ["_remove", "write_data", "_digest", "_write_at_once"])
def test_a_full_disk_is_an_error_on_all_ranks(ranks, tmp_path, where, asynchronous):
    replies = ranks(3, full_disk, tmp_path / "a", where, asynchronous)
    assert len(set(replies)) == 1
    message, found, later = replies[0]
    odd = 2 if where in ("write_data", "_digest") else 0
    assert f"was not written (rank {odd}: [Errno 28] No space left on device)" in message
    assert found == "step-00000001"
    assert later == "step-00000002"
