r"""Pretrain a Llama or a Qwen3-MoE in float8 under FSDP2: a plain PyTorch loop to copy.

    torchrun --nproc-per-node 8 recipes/pretrain.py \
        --job.config_file recipes/pretrain.toml --float8.recipe rowwise

Runs on CUDA (NCCL) and on the CPU (gloo), on any number of ranks; one process needs no torchrun. ``--help``
lists the settings, ``--compare bf16`` trains twice and plots both losses, ``--compare gradients`` three times, with
gradients reduced in float32, bfloat16 and float8.

A rank that dies takes all of them down; torchrun starts them again, and they resume, with

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts 3 --nproc-per-node 8 recipes/pretrain.py \
        --job.config_file recipes/pretrain.toml --checkpoint.interval 100 --checkpoint.resume newest

Without the variable torchrun keeps one store for all restarts, in which ranks find the addresses of dead ones.

SIGTERM or SIGINT to any rank makes all of them save and exit with 0 after the step that follows the one they are in.
torchrun passes a signal of its own on and then waits 30 s (``--shutdown-timeout``).
"""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from f8sub_pretrain.checkpoint import CheckpointError, Checkpoints
from f8sub_pretrain.compare import compare
from f8sub_pretrain.cpu import bfloat16_products_in_float32, is_bfloat16_slow
from f8sub_pretrain.data import PackedSequences, load_tokenizer
from f8sub_pretrain.documents import DataError
from f8sub_pretrain.metrics import Metrics, peak_memory_gib
from f8sub_pretrain.model import build_model
from f8sub_pretrain.settings import Settings, SettingsError, as_dict, parse
from f8sub_pretrain.traffic import Traffic, count_traffic
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import f8sub

SHARED_STORE = (
    "torchrun was asked to restart ranks that die, but restarted ranks would look for the dead ones in the store that "
    "it keeps: start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment."
)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
HISTORY = ".float8_attention.history"
"""Ends the names of what attention in float8 knows of its past, which is empty at first."""


class Moment:
    """The moment at which the device has done what it was given so far.

    The host's clock would not tell it on a GPU, which the host runs ahead of.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = time.monotonic()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Let the host wait for it."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_after(self, earlier: Moment) -> float:
        """Give the time from an earlier one to this one, which is past."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1000


class Running(NamedTuple):
    """A step that was launched.

    Attributes:
        record: What is known of its metrics.
        numbers: float64 on the host, valid after ``done``: the sum of the ranks' losses, how many were asked to stop,
            the gradients' norm.
        done: When they are there.
    """

    record: dict[str, Any]
    numbers: torch.Tensor
    done: Moment


class Trainer:
    """One run: model, optimizer and data, and the loop over them."""

    def __init__(self, settings: Settings, mesh: DeviceMesh, stop: StopRequest, title: str) -> None:
        self.settings = settings
        self.mesh = mesh
        self.stop = stop
        self.rank, self.world_size = mesh.get_local_rank(), mesh.size()
        self.device = torch.device(mesh.device_type)
        self.tokenizer = load_tokenizer(settings.data.tokenizer)
        self.train_data = PackedSequences(settings, self.tokenizer, "train", self.rank, self.world_size)
        folder = Path(settings.job.dump_folder)
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            settings.checkpoint.keep_latest_k,
            asynchronous=settings.checkpoint.async_mode == "async",
        )
        self.metrics = Metrics(settings, folder, self.rank, title)
        # Eager, it writes the logits three times in float32.
        self.cross_entropy = torch.compile(_cross_entropy) if settings.compile.enabled else _cross_entropy
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=settings.training.dtype == "float16")
        self.step = 0
        self.running: Running | None = None
        self.why_torch: str | None = None
        self.stopping = False
        self.monitor: f8sub.Monitor | None = None
        self.replayed = Traffic()
        self.resumes_from = self.checkpoint_to_resume()
        ended = settings.float8_ended(Checkpoints.step_of(self.resumes_from))
        report = self.build(settings.without_float8() if ended else settings)
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.metrics.say(
            f"{self.metrics.title}: {settings.model.size}, {parameters:,} parameters, {self.world_size} "
            f"{'rank' if self.world_size == 1 else 'ranks'} on {self.device.type}, {report}"
        )

    def build(self, settings: Settings) -> str:
        """Make the model, its optimizer and its step.

        Args:
            settings: This run's, or those of the run without float8.

        Returns:
            What ``build_model`` says of the model.
        """
        self.model_settings = settings
        self.model, report = build_model(settings, self.tokenizer.vocab_size, self.mesh)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.optimizer.lr,
            betas=(settings.optimizer.beta1, settings.optimizer.beta2),
            eps=settings.optimizer.eps,
            weight_decay=settings.optimizer.weight_decay,
            fused=True,  # by default torch takes sharded parameters one at a time, and the GPU waits for the host
        )
        self.fused = self.fused_step()
        self.graph = self.graphed_step()
        if self.settings.uses_float8 and not settings.uses_float8:
            self.metrics.rename(f"{self.metrics.title} until step {self.settings.float8.until_step}")
        return report

    def run(self) -> bool:
        """Train to the last step, or to a step at which some rank was asked to stop.

        Returns:
            Whether the run came to its last step.
        """
        settings = self.settings
        self.resume()
        if self.model_settings.float8_recipe and self.graph is None:
            f8sub.precompute_scales(self.model)
        prefer = f8sub.prefer_cudnn_attention if settings.model.attention == "auto" else nullcontext
        with prefer() as by_cudnn, self.metrics, count_traffic() as traffic:
            if by_cudnn:
                self.metrics.say("Attention: cuDNN's kernels first.")
            self.metrics.open(self.step + 1)
            if self.model_settings.float8_recipe and settings.float8.monitor_every:
                self.monitor = f8sub.Monitor(
                    self.model, settings.float8.monitor_every, to=self.metrics.write_numerics
                )
            self.since = Moment(self.device)
            while not self.ended:
                if self.model_settings.uses_float8 and self.settings.float8_ended(self.step):
                    self.leave_float8()
                before, self.running = replace(traffic), self.train_step()
                record = self.running.record
                record |= self.traffic_of_step(traffic, before)
                last = self.step == settings.training.steps
                evaluates = _due(self.step, settings.eval.interval, last)
                saves = _due(self.step, settings.checkpoint.interval, last)
                if evaluates or saves or self.stopping:
                    self.read()
                if evaluates and (last or not self.stopping):
                    self.evaluate()
                if saves or (self.stopping and not last):
                    self.save()
                if evaluates or saves:
                    self.since = Moment(self.device)
            self.read()
            self.checkpoints.wait()
            self.close()
            if self.step < settings.training.steps:
                self.metrics.say(f"Stopped by a signal after step {self.step}.")
        return self.step >= settings.training.steps

    def close(self) -> None:
        """Free the graph, and write what the monitor has measured."""
        if self.graph is not None:
            self.graph.close()
        if self.monitor is not None:
            self.monitor.flush()
            self.metrics.draw_numerics()

    def leave_float8(self) -> None:
        """Go on with a model without float8, as a run does that is resumed from here without it.

        The old model is freed before the new one is allocated, but for its weights, which are copied, and the
        optimizer's states, which the new optimizer takes over: 16 bytes per parameter at the peak, as many as weights,
        states and gradients take in training.
        """
        self.read()
        self.close()
        names = [name for name, _ in self.model.named_parameters()]
        states = [self.optimizer.state[parameter] for parameter in self.model.parameters()]
        weights = get_model_state_dict(self.model)
        del self.model, self.optimizer, self.fused, self.graph
        self.monitor = None
        gc.collect()
        # The new model is compiled as in a process of its own.
        torch.compiler.reset()
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            self.build(self.settings.without_float8())
        # Float8 has amax histories of its own.
        plain = get_model_state_dict(self.model).keys()
        set_model_state_dict(self.model, {name: weights[name] for name in plain})
        parameters = dict(self.model.named_parameters())
        for name, state in zip(names, states, strict=True):
            self.optimizer.state[parameters[name]] = state
        self.metrics.say(f"From step {self.step + 1} on in {self.settings.training.dtype}.")
        self.since = Moment(self.device)

    @property
    def ended(self) -> bool:
        """Whether the last step was trained, if only by the run resumed from, or some rank was asked to stop."""
        return self.stopping or self.step >= self.settings.training.steps

    def train_step(self) -> Running:
        """Launch one step.

        Returns:
            What ``read`` reads; on a GPU the step is still running.
        """
        rate = learning_rate(self.settings, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        count = self.settings.training.gradient_accumulation_steps
        batches = [self.batch(self.train_data) for _ in range(count)]
        with self.monitor or nullcontext():
            if self.graph is None:
                loss_sum, grad_norm = self.forward_backward(batches)
            else:
                loss_sum, grad_norm = self.replay(self.graph, batches)
        if self.graph is None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        self.say_who_steps()
        # The step before is read while this one runs, or the GPU would wait for the host to launch it. Its loss tells
        # more than the weights that it spoiled, which precompute_scales would name.
        self.read()
        if self.model_settings.float8_recipe and self.graph is None:
            f8sub.precompute_scales(self.model)
        self.step += 1

        # One all-reduce for both: the ranks agree on the step at which they stop.
        shared = torch.stack([loss_sum, torch.full_like(loss_sum, float(self.stop.requested))])
        dist.all_reduce(shared)
        numbers = torch.cat([shared, grad_norm.to(shared).view(1)]).to("cpu", non_blocking=True)
        return Running({"step": self.step, "lr": rate}, numbers, Moment(self.device))

    def forward_backward(self, batches: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute gradients of all micro-batches and clip them.

        Returns:
            The sum of this rank's losses, float64, and the norm of the gradients of all ranks before they are clipped.
        """
        training = self.settings.training
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
            loss = self.loss(batch) / len(batches)
            self.scaler.scale(loss).backward()
            loss_sum += loss.detach()
        self.scaler.unscale_(self.optimizer)
        max_norm = training.max_norm or math.inf
        if self.fused is not None:
            return loss_sum, self.fused.clip_grad_norm_(max_norm)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        return loss_sum, grad_norm

    def fused_step(self) -> f8sub.optim.FusedStep | None:
        """Give what clips and steps in one pass, if the settings ask for it."""
        asked = self.settings.optimizer.one_pass
        if asked == "auto":
            asked = self.device.type == "cuda"
        return f8sub.optim.fuse_step(self.optimizer) if asked else None

    def say_who_steps(self) -> None:
        """Say once why torch's kernels take the steps, if they were not asked to."""
        if self.fused is not None and self.fused.why_torch not in (None, self.why_torch):
            self.metrics.say(f"Optimizer: torch's kernels step, because {self.fused.why_torch}.")
            self.why_torch = self.fused.why_torch

    def graphed_step(self) -> f8sub.GraphedStep | None:
        """Give what replays the step, scales and optimizer among it, if the settings ask for it."""
        asked = self.settings.compile.cuda_graph
        if asked == "auto":
            asked = self.device.type == "cuda" and not self.scaler.is_enabled()
        return f8sub.graph_step(self.forward_backward, self.model, self.optimizer) if asked else None

    def replay(
        self, graph: f8sub.GraphedStep, batches: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give what ``forward_backward`` does; the optimizer has stepped then."""
        try:
            found: tuple[torch.Tensor, torch.Tensor] = graph(batches)
        except f8sub.Float8NumericsError:
            self.read()  # the loss of the step before tells more than the weights that it spoiled
            raise
        return found

    def traffic_of_step(self, now: Traffic, before: Traffic) -> dict[str, int]:
        """Give what the last step sent: a replay calls no collective, and sends what the captured step did."""
        if self.graph is None or self.graph.how != "replayed":
            self.replayed = Traffic(
                now.all_gather_bytes - before.all_gather_bytes,
                now.reduced_bytes - before.reduced_bytes,
                now.amax_all_reduces - before.amax_all_reduces,
            )
        return asdict(self.replayed)

    def read(self) -> None:
        """Wait for the step that is running, if one is, write and show its metrics, and note who was asked to stop.

        Raises:
            FloatingPointError: If the loss is not finite.
        """
        if self.running is None:
            return
        (record, numbers, done), self.running = self.running, None
        done.wait()
        loss_sum, requests, grad_norm = numbers.tolist()
        record |= {"loss": loss_sum / self.world_size, "grad_norm": grad_norm}
        if not math.isfinite(record["loss"]):
            raise FloatingPointError(
                f"The loss of step {record['step']} is {record['loss']}. Resume from a checkpoint before it "
                "(--checkpoint.resume newest) with a lower --optimizer.lr."
            )
        record["tokens_per_second"] = self.tokens_per_step() / done.seconds_after(self.since)
        self.since = done
        record["memory"] = peak_memory_gib(self.device)
        self.metrics.write({**record, "time": time.time()})
        self.metrics.show(record)
        self.stopping |= requests > 0

    def batch(self, data: PackedSequences) -> torch.Tensor:
        """Give this rank's next sequences, on the device."""
        batch = data.next_batch(self.settings.training.local_batch_size)
        if self.device.type == "cuda":
            batch = batch.pin_memory()  # the host waits for a copy from other memory
        return batch.to(self.device, non_blocking=True)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Give the mean loss of sequences; in training a mixture's balance of experts is a part."""
        out = self.model(input_ids=batch[:, :-1], use_cache=False)
        loss = self.cross_entropy(out.logits, batch[:, 1:])
        balance = getattr(out, "aux_loss", None)
        if balance is not None and self.model.training:
            loss += self.model.router_aux_loss_coef * balance
        return loss

    def evaluate(self) -> None:
        """Write the mean loss on the first batches of the documents kept aside."""
        loss = self.held_out_loss()
        self.metrics.write({"step": self.step, "eval_loss": loss, "time": time.time()})
        self.metrics.say(f"{self.metrics.title}  step {self.step}  eval loss {loss:.4f}")

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Give the mean loss of all ranks on the first batches of the documents kept aside."""
        data = PackedSequences(self.settings, self.tokenizer, "eval", self.rank, self.world_size)
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for _ in range(self.settings.eval.batches):
            total += self.loss(self.batch(data))
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # backward, which would do it, does not follow
        dist.all_reduce(total)
        return total.item() / self.settings.eval.batches / self.world_size

    def tokens_per_step(self) -> int:
        """Give the tokens that all ranks together train on in a step."""
        training = self.settings.training
        sequences = training.local_batch_size * training.gradient_accumulation_steps * self.world_size
        return sequences * training.seq_len

    def tensors(self) -> dict[str, torch.Tensor]:
        """Give all tensors of the training state under the names that checkpoints use."""
        tensors: dict[str, Any] = {f"model.{name}": v for name, v in get_model_state_dict(self.model).items()}
        optimizer = self.optimizer_state()
        tensors |= {f"optimizer.{name}": v for name, v in optimizer.items() if isinstance(v, torch.Tensor)}
        tensors[f"rng.cpu.{self.rank}"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors[f"rng.cuda.{self.rank}"] = torch.cuda.get_rng_state(self.device)
        return tensors

    def optimizer_state(self) -> dict[str, Any]:
        """Give the optimizer's state and hyperparameters under the parameters' names, flat."""
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def save(self) -> None:
        """Save everything that the next step depends on."""
        state = {
            "step": self.step,
            "data": self.train_data.state_dict(),
            "scaler": self.scaler.state_dict(),
            "settings": as_dict(self.settings),
        }
        name = self.checkpoints.save(self.step, self.tensors(), state, self.model.config.to_dict())
        verb = "Saved" if self.settings.checkpoint.async_mode == "disabled" else "Saving"
        self.metrics.say(f"{verb} {self.checkpoints.folder / name}")

    def checkpoint_to_resume(self) -> str:
        """Give the name of the checkpoint that ``checkpoint.resume`` asks for; empty for a fresh start.

        Raises:
            CheckpointError: If none is whole, or if a new run would mix its checkpoints with those of an older one.
        """
        name = self.settings.checkpoint.resume
        if not name and (there := self.checkpoints.names()):
            raise CheckpointError(
                f"{self.checkpoints.folder} has checkpoints of an earlier run, up to {there[-1]}. Go on "
                "from them with --checkpoint.resume newest, or start anew in another --job.dump_folder."
            )
        if name != "newest":
            return name
        name, broken = self.checkpoints.newest_whole()
        for other, problem in broken.items():
            self.metrics.say(f"Checkpoint {other} is refused: {problem}.")
        if not name and broken:
            raise CheckpointError(
                f"No checkpoint in {self.checkpoints.folder} is whole. "
                "Start anew in another --job.dump_folder."
            )
        if not name:
            self.metrics.say(f"No checkpoint in {self.checkpoints.folder} yet: starting at step 1.")
        return name

    def resume(self) -> None:
        """Go to the checkpoint that ``checkpoint.resume`` asks for, if it asks for one.

        Raises:
            CheckpointError: If it is not whole or of another run.
        """
        name = self.resumes_from
        if not name:
            return
        tensors = self.tensors()
        # Ranks may be more than there were; and a run whose attention was in bf16 goes on with it in float8.
        may_lack = frozenset(key for key in tensors if key.startswith("rng.") or key.endswith(HISTORY))
        state = self.checkpoints.load(name, tensors, optional=may_lack)
        set_model_state_dict(self.model, _under(tensors, "model."))
        optimizer = {**self.optimizer_state(), **_under(tensors, "optimizer.")}
        set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=FLAT)
        torch.set_rng_state(tensors[f"rng.cpu.{self.rank}"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors[f"rng.cuda.{self.rank}"], self.device)
        self.train_data.load_state_dict(state["data"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]
        rest = ": all of its steps are trained" if self.ended else ""
        self.metrics.say(f"Resumed from {self.checkpoints.folder / name}{rest}")


class StopRequest:
    """Whether SIGTERM or SIGINT has asked this process to save and stop."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.requested = True


def learning_rate(settings: Settings, step: int) -> float:
    """Give the learning rate of a step: linear warmup, a constant rate, then a cosine.

    Args:
        settings: Peak rate, warmup, floor and length of the run.
        step: Steps trained before this one.

    Returns:
        The rate.
    """
    peak, schedule = settings.optimizer.lr, settings.lr_scheduler
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    steps = settings.training.steps
    start = max(schedule.warmup_steps, steps - round(schedule.decay_ratio * steps))
    done = max(0, step - start) / max(1, steps - start)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return peak * (schedule.min_lr_factor + (1 - schedule.min_lr_factor) * cosine)


@contextmanager
def joined_ranks(settings: Settings) -> Iterator[DeviceMesh]:
    """Join the ranks that torchrun started, or be the only one.

    Args:
        settings: Which device to use.

    Yields:
        The mesh of all ranks.

    Raises:
        SettingsError: If a rank would have no GPU, and CUDA was asked for or others have one.
    """
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    kind = settings.training.device
    if kind == "auto":
        # Where some ranks would have one, nobody means the CPU.
        kind = "cuda" if gpus else "cpu"
    if kind == "cuda" and gpus < local_ranks:
        raise SettingsError(
            f"--training.device {settings.training.device} needs a GPU for each of this machine's ranks "
            f"({local_ranks}), and found {gpus}. Start at most one rank per GPU, or use --training.device cpu."
        )
    options: dict[str, Any] = {"backend": "gloo"}
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
        torch.set_float32_matmul_precision("high")
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", local_rank)}
    if "RANK" not in os.environ:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    restarts, shared = (
        os.environ.get(f"TORCHELASTIC_{name}") for name in ("MAX_RESTARTS", "USE_AGENT_STORE")
    )
    if (restarts or "0") != "0" and shared == "True" and os.environ["RANK"] == "0":
        print(SHARED_STORE, file=sys.stderr)
    dist.init_process_group(**options)
    products: AbstractContextManager[None] = nullcontext()
    if kind == "cpu" and is_bfloat16_slow():
        products = bfloat16_products_in_float32()
    with products:
        yield init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    dist.destroy_process_group()
    # gloo's worker threads outlive the group (DTensor's caches hold it), and one that drops a finished collective's
    # last tensor while Python is finalized takes the process with it ("terminate called without an active
    # exception", torch 2.13, seen on loaded machines). They need microseconds of a core, which this lets them have.
    time.sleep(0.5)


def main() -> None:
    """Run the job that the command line describes."""
    rank = os.environ.get("RANK", "0")
    try:
        settings = parse()
        stop = StopRequest()
        with joined_ranks(settings) as mesh:
            if settings.compare:
                compare(settings, lambda one, title: Trainer(one, mesh, stop, title).run())
            else:
                Trainer(settings, mesh, stop, settings.float8_recipe or settings.training.dtype).run()
    except (
        SettingsError,
        DataError,
        CheckpointError,
        FloatingPointError,
        f8sub.Float8ConfigError,
        f8sub.Float8NumericsError,
    ) as error:
        sys.exit(f"rank {rank}: {error}")


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _due(step: int, interval: int, last: bool) -> bool:
    return interval > 0 and (last or step % interval == 0)


def _under(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


if __name__ == "__main__":
    main()
