"""A checkpoint is whole or refused by name, before anything opens its files; and how it comes to the disk."""

import errno
import json
import os
import pickle
import shutil
import threading
from pathlib import Path

import pytest
import torch
from f8sub_pretrain import checkpoint
from f8sub_pretrain.checkpoint import CheckpointError, Checkpoints
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.models import refusal
from tests.selection import long_but

# Ranks that are interrupted in the middle of a save.
pytestmark = pytest.mark.own_ranks

STATE = {"step": 1, "float": 0.1, "nested": {"list": [1, 2]}}


def some_tensors(world, seed):
    """A tensor in shards of uneven size, one that all ranks have, and one of each rank's own."""
    mesh = init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(7, 3, generator=generator)
    rank = mesh.get_local_rank()
    return {
        "sharded": distribute_tensor(full, mesh, [Shard(0)]),
        "same": torch.randn(2, generator=generator),
        f"own.{rank}": torch.full((1,), float(rank + seed)),
    }


def save(rank, world, folder, steps, keep=0, asynchronous=False):
    checkpoints = Checkpoints(folder, keep, asynchronous)
    for step in steps:
        checkpoints.save(step, some_tensors(world, step), STATE)
    checkpoints.wait()


def load(rank, world, folder, name, optional=frozenset()):
    """What a checkpoint gave, or the message of its refusal."""
    tensors = some_tensors(world, 99)
    try:
        state = Checkpoints(folder).load(name, tensors, optional)
    except CheckpointError as error:
        return str(error)
    plain = {key: value.full_tensor() if key == "sharded" else value for key, value in tensors.items()}
    return state, {key: value.tolist() for key, value in plain.items()}


def newest(rank, world, folder):
    return Checkpoints(folder).newest_whole()


@pytest.fixture
def folder(ranks, tmp_path, tmp_path_factory):
    """Checkpoints of steps 1 and 2, from two ranks; saved once and copied for each test."""
    saved = tmp_path_factory.getbasetemp() / "saved_checkpoints"
    if not saved.exists():
        ranks(2, save, saved, [1, 2])
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def manifest_of(step):
    return json.loads((step / "manifest.json").read_text())


def write_manifest(step, files):
    (step / "manifest.json").write_text(json.dumps({**manifest_of(step), "files": files}))


def sign(step):
    """Make the manifest agree with the files, as someone who wants to do harm would."""
    write_manifest(step, {name: checkpoint._digest(step / name) for name in manifest_of(step)["files"]})


def test_what_is_saved_is_loaded(ranks, folder):
    replies = ranks(2, load, folder, "step-00000002")
    generator = torch.Generator().manual_seed(2)
    full, same = torch.randn(7, 3, generator=generator), torch.randn(2, generator=generator)
    for rank, (state, tensors) in enumerate(replies):
        assert state == STATE
        assert tensors == {"sharded": full.tolist(), "same": same.tolist(), f"own.{rank}": [float(rank + 2)]}


def test_another_number_of_ranks_loads_all_but_the_tensors_of_ranks(ranks, folder):
    optional = frozenset({"own.2"})
    replies = ranks(3, load, folder, "step-00000002", optional)
    assert [tensors["sharded"] for _, tensors in replies] == [replies[0][1]["sharded"]] * 3
    assert [list(tensors.values())[2] for _, tensors in replies] == [[2.0], [3.0], [2.0 + 99]]
    assert "has no tensor own.2" in ranks(3, load, folder, "step-00000002")[2]


def truncate(step):
    os.truncate(step / "__1_0.distcp", (step / "__1_0.distcp").stat().st_size - 1)


def flip_a_bit(step):
    data = bytearray((step / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (step / "__0_0.distcp").write_bytes(data)


def escape(step):
    files = manifest_of(step)["files"]
    write_manifest(step, {**files, "../evil": files[".metadata"]})


def drop_the_index(step):
    files = manifest_of(step)["files"]
    write_manifest(step, {name: digest for name, digest in files.items() if name != ".metadata"})


def link_outside(step):
    (step / "__0_0.distcp").rename(step.parent / "elsewhere")
    (step / "__0_0.distcp").symlink_to(step.parent / "elsewhere")


BREAKS = {
    "truncated": (truncate, "__1_0.distcp has [0-9]+ bytes where the manifest says [0-9]+"),
    "one bit": (flip_a_bit, "the digest of __0_0.distcp differs"),
    "file missing": (lambda step: (step / "state.json").unlink(), "state.json is missing"),
    "no manifest": (lambda step: (step / "manifest.json").unlink(), "no manifest.json, so saving it was cut"),
    "half a manifest": (lambda step: (step / "manifest.json").write_text('{"files"'), "cannot be read"),
    "empty manifest": (lambda step: (step / "manifest.json").write_text("[]"), "cannot be read"),
    "outside the folder": (escape, r"lists '\.\./evil', which is not a file of its folder"),
    "unlisted index": (drop_the_index, "does not list .metadata"),
    "symlink": (link_outside, "__0_0.distcp is not a regular file"),
    "no folder": (shutil.rmtree, r"no such checkpoint \(there are step-00000001\)"),
}


@pytest.mark.parametrize(("break_it", "problem"), BREAKS.values(), ids=BREAKS)
def test_a_broken_checkpoint_is_refused_on_all_ranks(ranks, folder, break_it, problem):
    break_it(folder / "step-00000002")
    replies = ranks(2, load, folder, "step-00000002")
    assert replies[0] == replies[1]
    message = replies[0]
    assert "Checkpoint step-00000002" in message
    assert "Resume with --checkpoint.resume step-00000001" in message
    with pytest.raises(CheckpointError, match=problem):
        raise CheckpointError(message)


def test_without_an_older_whole_one_the_refusal_says_so(ranks, folder):
    for name in ("step-00000001", "step-00000002"):
        flip_a_bit(folder / name)
    assert "No checkpoint before it is whole" in ranks(1, load, folder, "step-00000002")[0]
    assert ranks(1, newest, folder)[0][0] == ""


def test_newest_passes_over_broken_ones_and_says_why(ranks, folder):
    assert ranks(2, newest, folder) == [("step-00000002", {})] * 2
    truncate(folder / "step-00000002")
    for name, broken in ranks(2, newest, folder):
        assert name == "step-00000001"
        assert "__1_0.distcp has" in broken["step-00000002"]


def save_and_die(rank, world, folder):
    """A save that ends before the manifest."""

    def stop(path, text):
        raise KeyboardInterrupt

    checkpoint._write_at_once = stop
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(folder).save(3, some_tensors(world, 3), STATE)


def test_a_save_cut_short_leaves_nothing_that_looks_whole(ranks, folder):
    ranks(1, save_and_die, folder)
    assert (folder / "step-00000003" / ".metadata").exists()
    (name, broken), _ = ranks(2, newest, folder)
    assert name == "step-00000002"
    assert "cut short" in broken["step-00000003"]
    ranks(2, save, folder, [3])
    assert ranks(2, newest, folder)[0] == ("step-00000003", {})


def test_saving_a_step_again_leaves_no_file_of_the_old_one(ranks, folder):
    ranks(1, save, folder, [2])
    assert not (folder / "step-00000002" / "__1_0.distcp").exists()
    assert ranks(1, load, folder, "step-00000002")[0][0] == STATE


def test_only_the_latest_are_kept(ranks, folder):
    ranks(1, save, folder, [3, 4], 2)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000004"]


class Canary:
    """Unpickling this makes a folder: the sign that somebody's code ran."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def canary(tmp_path):
    path = tmp_path / "code_ran"
    yield path
    assert not path.exists()
    pickle.loads(pickle.dumps(Canary(path)))
    assert path.is_dir()  # it would have sung


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_pickle_in_place_of_a_file_is_not_opened(ranks, folder, canary, name):
    (folder / "step-00000002" / name).write_bytes(pickle.dumps(Canary(canary)))
    assert f"{name} has" in ranks(1, load, folder, "step-00000002")[0]


def test_files_beside_the_listed_ones_are_not_opened(ranks, folder, canary):
    for name in ("__2_0.distcp", "extra.pt", "sitecustomize.py"):
        (folder / "step-00000002" / name).write_bytes(pickle.dumps(Canary(canary)))
    assert ranks(2, load, folder, "step-00000002")[0][0] == STATE


def test_even_a_signed_index_runs_no_code(ranks, folder, canary):
    (folder / "step-00000002" / ".metadata").write_bytes(pickle.dumps(Canary(canary)))
    sign(folder / "step-00000002")
    assert "it asks for posix.mkdir" in ranks(1, load, folder, "step-00000002")[0]


def test_even_a_signed_index_leads_to_no_other_file(ranks, folder):
    step = folder / "step-00000002"
    index = pickle.loads((step / ".metadata").read_bytes())
    next(iter(index.storage_data.values())).relative_path = "../step-00000001/__0_0.distcp"
    (step / ".metadata").write_bytes(pickle.dumps(index))
    sign(step)
    told = ranks(1, load, folder, "step-00000002")[0]
    assert "'../step-00000001/__0_0.distcp', which the manifest does not list" in told


@pytest.mark.parametrize("world", [1])
def test_tensors_of_another_shape_are_refused(rank, world, folder):
    told = refusal(CheckpointError, Checkpoints(folder).load, "step-00000002", {"same": torch.zeros(3)})
    assert "same of shape (2,), this run's is (3,)" in told


def test_names_are_steps_in_order(tmp_path):
    for name in ("step-00000010", "step-00000009", "step-x", "other"):
        (tmp_path / name).mkdir()
    assert Checkpoints(tmp_path).names() == ["step-00000009", "step-00000010"]
    assert Checkpoints(Path("/no/such/folder")).names() == []


def test_in_the_background_the_same_files_are_written(ranks, tmp_path):
    ranks(3, save, tmp_path / "sync", [1, 2])
    ranks(3, save, tmp_path / "async", [1, 2], 0, True)
    tensors = {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "state.json"}
    for step in (1, 2):
        folders = (tmp_path / kind / f"step-{step:08d}" for kind in ("sync", "async"))
        expected, found = (manifest_of(folder)["files"] for folder in folders)
        assert set(found) == set(expected) == tensors | {".metadata"}
        files = {path.name for path in (tmp_path / "sync" / f"step-{step:08d}").iterdir()}
        assert files == set(found) | {"manifest.json"}
        assert all(found[name] == expected[name] for name in tensors)
    loaded = [ranks(3, load, tmp_path / kind, "step-00000002") for kind in ("sync", "async")]
    assert loaded[0] == loaded[1]


def hold(event):
    """Let no rank's tensors reach the disk before the event."""
    write_data = FileSystemWriter.write_data

    def held(self, *args, **kwargs):
        event.wait()
        return write_data(self, *args, **kwargs)

    FileSystemWriter.write_data = held


def test_training_goes_on_while_a_checkpoint_is_written(rank, world, tmp_path):
    """It is whole when its manifest is there and not before; the older one is kept until then."""
    folder = tmp_path / "a"
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
    assert meanwhile == "step-00000001"
    assert "cut short" in broken["step-00000002"]
    assert checkpoints.names() == ["step-00000002"]
    state, tensors = load(rank, world, folder, "step-00000002")
    assert state == STATE
    assert tensors["sharded"] == torch.randn(7, 3, generator=torch.Generator().manual_seed(2)).tolist()


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("asynchronous", long_but([True], [False, True]), ids=["sync", "async"])
@pytest.mark.parametrize("where", ["_remove", "write_data", "_digest", "_write_at_once"])
def test_a_full_disk_is_an_error_on_all_ranks(rank, world, tmp_path, where, asynchronous):
    """The last rank's, or rank 0's where only that writes."""
    odd = 2 if where in ("write_data", "_digest") else 0

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = Checkpoints(tmp_path / "a", asynchronous=asynchronous)
    checkpoints.save(1, some_tensors(world, 1), STATE)
    checkpoints.wait()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as error:  # noqa: PT012
        if rank == odd:
            patch.setattr(FileSystemWriter if where == "write_data" else checkpoint, where, fail)
        checkpoints.save(2, some_tensors(world, 2), STATE)
        checkpoints.wait()
    assert f"was not written (rank {odd}: [Errno 28] No space left on device)" in str(error.value)
    assert checkpoints.newest_whole()[0] == "step-00000001"
    checkpoints.save(2, some_tensors(world, 2), STATE)
    checkpoints.wait()
    assert checkpoints.newest_whole()[0] == "step-00000002"
