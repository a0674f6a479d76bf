"""What torchtitan of any version takes from its environment, where that has CPUs and gloo; and what tests look at."""

import contextlib
import json
import os
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CpuDevice(types.ModuleType):
    """torch.cpu, with the functions of torch.cuda that torchtitan calls besides."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    get_device_name = staticmethod(lambda device=None: "cpu")
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    memory_stats = staticmethod(lambda device=None: {})
    set_device = reset_peak_memory_stats = empty_cache = staticmethod(lambda device=None: None)

    def get_device_properties(self, device: Any = None) -> types.SimpleNamespace:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return types.SimpleNamespace(total_memory=memory, name="cpu")


def without_sleep(time: types.ModuleType) -> types.SimpleNamespace:
    """``time`` for torchtitan's trainer, whose rank 0 sleeps for two seconds after training."""
    names = ("perf_counter", "time", "monotonic")
    return types.SimpleNamespace(**{name: getattr(time, name) for name in names}, sleep=lambda seconds: None)


def with_sums(parallelize: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """torchtitan divides gradients by 1.0, which FSDP2 does by an operator that gloo has not."""

    def parallelized(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        model = parallelize(model, *args, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelized


def as_rank(rank: int, folder: Path) -> None:
    """Have a forked rank look as torchrun's do."""
    import datasets.config

    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    os.environ |= {"LOCAL_RANK": "0", "RANK": str(rank)}
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does where it makes the process group
    # A DTensor's operators return the mesh of an earlier run, equal to this run's, which FSDP2 compares by identity.
    _clear_sharding_prop_cache()


KINDS = "allgather", "allreduce", "alltoall"


class Collectives(TorchDispatchMode):
    """(kind, dtype) of every collective of this rank, with its calls and the bytes it puts in."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # what it is made of comes here too
        name = func._schema.name
        kind = next((k for k in KINDS if k in name.replace("_", "")), None)
        if kind is not None and name.startswith(("c10d::", "_c10d_functional::")):
            sent = args[1] if name.startswith("c10d::") and kind != "allreduce" else args[0]
            for tensor in tree_leaves(sent):
                key = kind, str(tensor.dtype).removeprefix("torch.")
                self.calls[key] += 1
                self.bytes[key] += tensor.numel() * tensor.element_size()
        return func(*args, **(kwargs or {}))


def train(trainer: Any, *, count: bool = False) -> dict[str, Any]:
    """``losses`` of a run by step; with ``count`` also ``calls`` and ``bytes``, lists of what was counted in each."""
    losses: dict[int, float] = {}
    calls: list[Counter[tuple[str, str]]] = []
    sizes: list[Counter[tuple[str, str]]] = []
    log = trainer.metrics_processor.log
    collectives = Collectives()

    def record(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        losses[step] = loss
        log(step, loss, *args, **kwargs)

    def counted(step: Any) -> Any:
        def run(*args: Any) -> None:
            collectives.calls, collectives.bytes = Counter(), Counter()
            step(*args)
            calls.append(collectives.calls)
            sizes.append(collectives.bytes)

        return run

    trainer.metrics_processor.log = record
    if count:
        trainer.train_step = counted(trainer.train_step)
    with collectives if count else contextlib.nullcontext():
        trainer.train()
    trainer.close()
    return {"losses": losses, "calls": calls, "bytes": sizes}


def make_assets(rank: int, world: int, folder: Path) -> None:
    """A tokenizer trained on the standard library's sources, and those as a data set."""
    import sysconfig

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    documents = [source.read_text(errors="ignore") for source in sources]
    (folder / "data").mkdir()
    (folder / "tokenizer").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (folder / "data" / "data.jsonl").write_text(lines)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|bos|>", "<|eos|>"]
    tokenizer.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=2048, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    marks = dict(zip(("bos_token", "eos_token"), special, strict=True))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(marks))
