"""Ranks forked from one warm process, about a tenth of a second for two of them; gloo, or NCCL with a GPU each.

``Nursery.start()`` forks a helper once, after collection and before the first test: torch and every test module are
imported in it, and no test has left threads or autograd workers behind. Ranks with GPUs are forked from another, which
imports no test: some imports start CUDA, after which no fork can. For each request it forks the ranks, which meet
through a file, run ``body(rank, world, *args)`` and send back a pickled result. Ranks that miss the deadline are killed
by their own ids, after each wrote where it stood; each also carries an alarm of its own.

The tests of a file use the same ranks, one after another, unless they are marked ``own_ranks``: half of what a short
body costs is a new process that does everything for the first time. If one rank fails, none of its group is used again.
"""

import contextlib
import datetime
import faulthandler
import gc
import importlib
import itertools
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

REAPED_WITHIN = 10.0
"""Seconds after which a killed rank is left behind: one that hangs in a driver's call may not end at all."""
DEADLINE = 300.0
"""Seconds that ranks have: so many that only ranks that wait for ever miss it, however busy the machine is."""
SHARED_BY = 40
"""Bodies that run in the same ranks: each may leave process groups with their threads and descriptors behind."""
ANSWERED_WITHIN = 60.0
"""Seconds, beside the ranks' own, after which the nursery is taken for lost."""


def make_collections_rare() -> None:
    """Have Python look for cycles after 50 000 new objects, not 700: looking was a tenth of what compiling takes.

    Tests for which cycles have to be gone collect them.
    """
    gc.set_threshold(50_000, 20, 50)


def leave_guards_unmeasured() -> None:
    """Have torch.compile log no time that guards take: for that it empties the processor's cache after each graph.

    To compile a small graph takes twice as long with it. Called before ``torch._dynamo`` is imported.
    """
    torch._C._dynamo.guards.profile_guard_manager = lambda *arguments: 0.0


class RankFailure(AssertionError):
    """At least one rank raised, died or missed the deadline; the message holds every traceback."""


@dataclass
class Request:
    """What ranks do: one body for all; with ``gpus``, rank r on device r; with ``file``, in that file's ranks."""

    world: int
    call: bytes  # a body and its arguments, pickled: only a rank imports what they need
    path: list[str]  # sys.path, for that
    timeout: float
    gpus: bool = False
    file: str | None = None


@dataclass
class Reply:
    """One rank's result, or the text of what went wrong."""

    result: bytes = b""  # pickled: a tensor of a GPU would start CUDA in the nursery
    error: str | None = None


@dataclass
class Child:
    """A forked rank as the nursery sees it."""

    rank: int
    pid: int
    connection: Connection
    reply: Reply | None = None
    finished: bool = False


def _send(connection: Connection, message: Any) -> None:
    """Pickled plainly: ``Connection.send`` would have torch share tensors' memory."""
    connection.send_bytes(pickle.dumps(message))


def _receive(connection: Connection) -> Any:
    """Raises EOFError where the other end is closed."""
    try:
        return pickle.loads(connection.recv_bytes())
    except ConnectionResetError as error:
        raise EOFError from error


def _run_rank(rank: int, request: Request, folder: Path, connection: Connection) -> None:
    """The whole life of one rank; never returns to the code that forked it."""
    with open(folder / f"output{rank}", "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable(2)
    filters = warnings.filters[:]
    for number in itertools.count():
        signal.alarm(int(request.timeout) + 5)
        faulthandler.dump_traceback_later(request.timeout * 0.75, file=2)
        try:
            warnings.filters[:] = filters
            _prepare(rank, request, folder / f"store{number}")
            body, args = pickle.loads(request.call)
            reply = Reply(result=pickle.dumps(body(rank, request.world, *args)))
        except BaseException:
            _send(connection, Reply(error=traceback.format_exc()))
            return  # at once: the others learn from the closed connection
        _send(connection, reply)
        # A rank may wait longer for the next test than a test may take.
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        following: Request | None = _receive(connection)
        if following is None:
            break
        request = following
    with contextlib.suppress(RuntimeError):
        dist.barrier()  # leaving while another rank still reads would look like a crash to it


def _prepare(rank: int, request: Request, store: Path) -> None:
    """What a body finds; of an earlier one in the same ranks, what it let go of is freed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.path[:] = request.path
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _strict_warnings(request.gpus)
    _wait_for_each_other(request.timeout)
    gc.enable()
    if request.gpus:
        torch.cuda.set_device(rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if dist.is_initialized():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        gc.collect()
        return
    _share_a_device()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if request.gpus else "gloo",
        store=dist.FileStore(str(store), request.world),
        rank=rank,
        world_size=request.world,
        timeout=datetime.timedelta(seconds=request.timeout),
    )


def _share_a_device() -> None:
    """Have all groups of this rank use one device of gloo.

    Each device has a thread that wakes up a hundred times a second, and ranks have dozens of groups of earlier tests.
    ``later`` are arguments of torch 2.15, whose defaults stay.
    """
    device = distributed_c10d.ProcessGroupGloo.create_device(interface="lo")

    class OnThatDevice(distributed_c10d.ProcessGroupGloo):
        def __init__(
            self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, **later: Any
        ) -> None:
            options = self._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnThatDevice


def _strict_warnings(gpus: bool) -> None:
    """Ranks fail on an unexpected Float8Warning, as the pytest process does."""
    import f8sub

    warnings.simplefilter("error", f8sub.Float8Warning)
    if gpus:  # every recipe is run on every GPU, those of other GPUs by the reference
        warnings.filterwarnings("ignore", ".*no native float8 GEMM")


def _wait_for_each_other(timeout: float) -> None:
    """Have no rank do without others that are late: on a busy machine a new process may be more than 3 s behind.

    Whatever an earlier body in the same ranks set. Tests of ranks that do not come have little patience themselves.
    """
    from f8sub.weights import agreement

    agreement.PATIENCE = datetime.timedelta(seconds=timeout / 2)


class Group:
    """Ranks that meet: forked for a first request, given others of the same world while none of them fails."""

    def __init__(self, request: Request) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._bodies = 0
        self._children: list[Child] = []
        for rank in range(request.world):
            self._children.append(self._fork(rank, request))

    def _fork(self, rank: int, request: Request) -> Child:
        mine, its_own = Pipe()
        pid = os.fork()
        if pid == 0:
            try:
                mine.close()
                _run_rank(rank, request, self._folder, its_own)
            finally:
                os._exit(0)
        its_own.close()
        return Child(rank, pid, mine)

    def run(self, request: Request) -> list[Reply]:
        """The replies to a request; the first is the one that the ranks were forked for."""
        if self._bodies:
            for child in self._children:
                child.reply = None
                os.truncate(self._folder / f"output{child.rank}", 0)
            self._send(request)
        _collect(self._children, request.timeout)
        replies = [self._reply_of(child, request) for child in self._children]
        self._bodies += 1
        return replies

    def _reply_of(self, child: Child, request: Request) -> Reply:
        reply = _reply_of(child, self._folder, request.timeout)
        if reply.error is not None and self._bodies:
            reply.error += f"\nThese ranks had run {self._bodies} tests of {request.file} before."
        return reply

    def _send(self, request: Request | None) -> None:
        for child in self._children:
            with contextlib.suppress(BrokenPipeError):
                _send(child.connection, request)

    def is_spent(self, replies: list[Reply]) -> bool:
        return self._bodies >= SHARED_BY or any(reply.error is not None for reply in replies)

    def end(self, within: float) -> None:
        """Wait so many seconds for the ranks to leave, then kill those that have not."""
        self._send(None)  # not by closing the pipe alone: ranks forked later have the other end, too
        _collect(self._children, within, until_closed=True)
        for child in self._children:
            if not child.finished:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
            _is_reaped(child.pid, REAPED_WITHIN)
            child.connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _collect(children: list[Child], timeout: float, until_closed: bool = False) -> None:
    """Waits for every rank's reply, or until it closes its connection, or the time is up."""
    deadline = time.monotonic() + timeout
    awaited = {child.connection: child for child in children if not child.finished}
    while awaited and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(awaited), left):
            child = awaited[connection]
            try:
                child.reply = _receive(connection)
            except EOFError:
                child.finished = True
            if child.finished or not until_closed:
                del awaited[connection]


def _reply_of(child: Child, folder: Path, timeout: float) -> Reply:
    output = "\n".join((folder / f"output{child.rank}").read_text(errors="replace").splitlines()[-300:])
    if child.reply is None:
        how = "died without an answer" if child.finished else f"no answer within {timeout:.0f} s; killed"
        return Reply(error=f"{how}.\n{output}")
    if child.reply.error is not None and output:
        child.reply.error += f"--- its output ---\n{output}"
    return child.reply


def _is_reaped(pid: int, within: float) -> bool:
    """Whether a child has ended within so many seconds."""
    deadline = time.monotonic() + within
    while os.waitpid(pid, os.WNOHANG)[0] != pid:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Server:
    """In the nursery: the ranks of one file, by how many they are."""

    def __init__(self) -> None:
        self._file: str | None = None
        self._shared: dict[int, Group] = {}

    def serve(self, request: Request) -> list[Reply]:
        if request.file != self._file:
            self.end()
        self._file = request.file
        group = self._shared.pop(request.world, None) or Group(request)
        replies = group.run(request)
        if request.file is None or group.is_spent(replies):
            # Ranks that answered leave together; of others there may be one that never does.
            all_well = all(reply.error is None for reply in replies)
            group.end(within=request.timeout if all_well else 0)
        else:
            self._shared[request.world] = group
        return replies

    def end(self) -> None:
        for group in self._shared.values():
            group.end(within=REAPED_WITHIN)
        self._shared.clear()


class Nursery:
    """The warm process that ranks are forked from."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid, self._connection = pid, connection
        self._lost = False

    @classmethod
    def start(cls, *modules: str) -> "Nursery":
        """Fork it; ``modules`` are imported in it too, once for all ranks."""
        mine, its_own = Pipe()
        pid = os.fork()
        if pid == 0:
            try:
                mine.close()
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                # A second that each rank's fully_shard would spend, and another of each that compiles.
                for module in ("torch._dynamo", "torch._inductor.compile_fx", *modules):
                    importlib.import_module(module)
                # What is imported lives as long as the ranks do: their collections, a second each, need not look.
                gc.freeze()
                server = Server()
                with contextlib.suppress(EOFError):
                    while (request := _receive(its_own)) is not None:
                        _send(its_own, server.serve(request))
                server.end()
            finally:
                os._exit(0)
        its_own.close()
        return cls(pid, mine)

    def run(
        self,
        world: int,
        body: Callable[..., Any],
        *args: Any,
        timeout: float = DEADLINE,
        gpus: bool = False,
        file: str | None = None,
    ) -> list[Any]:
        """``body(rank, world, *args)`` on ``world`` ranks; the results in the order of the ranks. See ``Request``.

        Ranks that have not answered after ``timeout`` seconds are killed. Those of a ``file`` are used by its tests one
        after another.
        """
        if not self._lost:
            call = pickle.dumps((body, args))
            _send(self._connection, Request(world, call, sys.path, timeout, gpus, file))
            self._lost = not self._connection.poll(timeout + ANSWERED_WITHIN)
        if self._lost:
            why = "the process that forks ranks does not answer; it is asked no more"
            raise RankFailure(f"{body.__name__}: {why}")
        replies: list[Reply] = _receive(self._connection)
        errors = [f"rank {n}: {each.error}" for n, each in enumerate(replies) if each.error is not None]
        if errors:
            told = [f"{len(errors)} of {world} ranks failed in {body.__name__}", *errors]
            raise RankFailure("\n".join(told))
        return [pickle.loads(reply.result) for reply in replies]

    def stop(self) -> None:
        if self._lost:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            _is_reaped(self.pid, REAPED_WITHIN)
            return
        # Not by closing the pipe alone: a process forked later has the other end, too.
        _send(self._connection, None)
        self._connection.close()
        os.waitpid(self.pid, 0)
