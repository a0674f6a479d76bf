"""What loading makes of damaged checkpoints: 10,000 random damages, uniform over all bytes of all of their files.

A checkpoint of recipes/pretrain.py, its manifest included, is damaged at a byte drawn from all bytes of all files, in
one of the ways below, and loaded. A clear refusal (CheckpointError) and a load that is right to the bit (the byte did
not matter: the manifest's step) are fine; anything else is a failure of this script. Beside it, single bits flipped in
the same tensors as torch.save, safetensors and torch.distributed.checkpoint hold them, without a manifest.

    python scripts/tables/corruption.py --write-docs
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import f8sub
from scripts.table import ROOT, Table, finish, parser

sys.path.insert(0, str(ROOT / "recipes"))

from f8sub_pretrain.checkpoint import CheckpointError, Checkpoints

Damage = Callable[[bytearray, int, random.Random], None]
Tensors = dict[str, torch.Tensor]
STEP = "step-00000001"
STATE = {"step": 1, "lr": 0.1, "data": {"position": [3, 4]}}
REFUSED, RIGHT, WRONG, UNCLEAR = "refused", "loaded, right", "loaded, wrong", "another error"


def flip(data: bytearray, at: int, rng: random.Random) -> None:
    data[at] ^= 1 << rng.randrange(8)


def overwrite(data: bytearray, at: int, rng: random.Random) -> None:
    size = rng.choice((1, 4, 64))
    data[at : at + size] = rng.randbytes(min(size, len(data) - at))


def zero(data: bytearray, at: int, rng: random.Random) -> None:
    size = min(rng.choice((16, 512)), len(data) - at)
    data[at : at + size] = bytes(size)


def truncate(data: bytearray, at: int, rng: random.Random) -> None:
    del data[at:]


def insert(data: bytearray, at: int, rng: random.Random) -> None:
    data[at:at] = rng.randbytes(rng.choice((1, 8)))


def repeat(data: bytearray, at: int, rng: random.Random) -> None:
    """A block of the file once more, over what follows it: the size stays."""
    size = min(rng.choice((16, 512)), (len(data) - at) // 2)
    data[at + size : at + 2 * size] = data[at : at + size]


DAMAGES: dict[str, Damage] = {
    "one bit flipped": flip,
    "bytes overwritten": overwrite,
    "bytes zeroed": zero,
    "truncated": truncate,
    "bytes inserted": insert,
    "a block repeated": repeat,
}


def example() -> Tensors:
    """A model's weights and AdamW's states after a step, amax histories included: some 30 tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 16))
    f8sub.convert_to_float8(model, recipe="delayed")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in enumerate(optimizer.state.values()):
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    return {name: value.clone() for name, value in tensors.items()}


@contextmanager
def damaged(files: list[Path], rng: random.Random, damage: Damage) -> Iterator[None]:
    """Damage one file at a byte that is uniform over the bytes of all, and mend it afterwards."""
    (path,) = rng.choices(files, [path.stat().st_size for path in files])
    whole = path.read_bytes()
    data = bytearray(whole)
    while bytes(data) == whole:
        damage(data, rng.randrange(len(whole)), rng)
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(whole)


def like(expected: Tensors) -> Tensors:
    """Tensors to load into, which hold something else."""
    return {name: torch.full_like(value, 7) for name, value in expected.items()}


def same(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(
        value.dtype == expected[name].dtype and bytes_of(value) == bytes_of(expected[name])
        for name, value in found.items()
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def load(checkpoints: Checkpoints, expected: Tensors) -> str:
    """What came of loading a checkpoint."""
    tensors = like(expected)
    try:
        state = checkpoints.load(STEP, tensors)
    except CheckpointError:
        return REFUSED
    except (Exception, CheckpointException) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return UNCLEAR
    return RIGHT if same(tensors, expected) and state == STATE else WRONG


def of_checkpoints(folder: Path, count: int, seed: int) -> dict[str, dict[str, int]]:
    """Damage -> outcome -> how often."""
    expected, rng = example(), random.Random(seed)
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, expected, STATE)
    files = sorted((folder / STEP).iterdir())
    assert load(checkpoints, expected) == RIGHT
    found: dict[str, Counter[str]] = {name: Counter() for name in DAMAGES}
    for index in range(count):
        name = list(DAMAGES)[index % len(DAMAGES)]
        with damaged(files, rng, DAMAGES[name]):
            found[name][load(checkpoints, expected)] += 1
    assert load(checkpoints, expected) == RIGHT
    return {name: dict(outcomes) for name, outcomes in found.items()}


def of_formats(folder: Path, count: int, seed: int) -> dict[str, dict[str, int]]:
    """Format -> outcome -> how often, of single bits flipped; no manifest."""
    expected = example()
    folder.mkdir(parents=True)

    def read_dcp() -> Tensors:
        tensors = like(expected)
        dcp.load(tensors, checkpoint_id=folder / "dcp")
        return tensors

    pickle, safe = folder / "model.pt", folder / "model.safetensors"
    torch.save(expected, pickle)
    save_file(expected, safe)
    dcp.save(expected, checkpoint_id=folder / "dcp")
    readers: dict[str, tuple[list[Path], Callable[[], Tensors]]] = {
        "torch.save": ([pickle], lambda: torch.load(pickle, weights_only=True)),
        "safetensors": ([safe], lambda: load_file(safe)),
        "torch.distributed.checkpoint": (sorted((folder / "dcp").iterdir()), read_dcp),
    }
    found: dict[str, Counter[str]] = {name: Counter() for name in readers}
    rng = random.Random(seed)
    for name, (files, read) in readers.items():
        assert same(read(), expected)
        for _ in range(count):
            with damaged(files, rng, flip):
                try:
                    outcome = RIGHT if same(read(), expected) else WRONG
                except (Exception, CheckpointException):
                    outcome = REFUSED
            found[name][outcome] += 1
    return {name: dict(outcomes) for name, outcomes in found.items()}


def table(damages: dict[str, dict[str, int]], flips: dict[str, dict[str, int]]) -> Table:
    columns = ["", "damages", REFUSED, RIGHT, WRONG]
    rows = {f"recipes/pretrain.py, {name}": outcomes for name, outcomes in damages.items()}
    rows["recipes/pretrain.py, all of these"] = dict(sum(map(Counter, damages.values()), Counter()))
    rows |= {f"{name} alone, one bit flipped": outcomes for name, outcomes in flips.items()}
    lines = [
        [name, f"{sum(found.values()):,}", *(f"{found.get(outcome, 0):,}" for outcome in columns[2:])]
        for name, found in rows.items()
    ]
    return Table("Damaged checkpoints", columns, lines)


def main() -> None:
    made = parser(__doc__, "corruption_table")
    made.add_argument("--count", type=int, default=10_000, help="damages")
    made.add_argument("--flips", type=int, default=1_000, help="bit flips of each format without a manifest")
    made.add_argument("--seed", type=int, default=0)
    arguments = made.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # DCP logs a traceback of each index that it cannot read
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        damages = of_checkpoints(Path(folder, "whole"), arguments.count, arguments.seed)
        flips = of_formats(Path(folder, "formats"), arguments.flips, arguments.seed)
    dist.destroy_process_group()
    bad = {name: found for name, found in damages.items() if found.keys() & {WRONG, UNCLEAR}}
    arguments.write_docs &= not bad
    finish(arguments, {"damages": damages, "flips": flips}, table(damages, flips))
    if bad:
        sys.exit(f"damages that were neither refused clearly nor loaded right: {bad}")


if __name__ == "__main__":
    main()
