"""Real ranks for tests: fresh processes from a preloaded fork server, one gloo group, one deadline.

A body is a module-level function ``body(rank, world_size, **kwargs)`` that takes picklable arguments and returns plain
data (tensors are allowed). Assertions on the returned list live in the test. Each rank runs in a temporary directory of
the run, so give absolute paths (``tmp_path``) for whatever must outlive it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",  # the first DistributedDataParallel(...) imports it: 1-3 s in every process otherwise
    "torch._dynamo.backends.debugging",  # likewise the first compilation, of this and the next two
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "numpy",
    "pytest",
    "ddp_nanguard.guard",
    "ddp_nanguard.dump.read",
    "ddp_nanguard.dump.write",
    "tests.rank_processes",
    "tests.preload",
]
STACK_SIGNAL = signal.SIGUSR1
STACK_WAIT_S = 0.5
GROUP_TIMEOUT_MARGIN_S = 60.0  # the deadline judges hangs, never the group's own timeout
PR_SET_PDEATHSIG = 1
SIMULATED, REAL = "simulated", "real"
"""Devices that a body may ask for besides the CPU: `tests.device.simulated_cuda`, or the machine's own GPUs."""

Body = Callable[..., Any]


class RanksFailedError(AssertionError):
    """At least one rank ended otherwise than expected; the text shows every rank's outcome."""


@dataclass
class Outcome:
    """How one rank ended.

    Attributes:
        rank: its global rank.
        value: what the body returned.
        returned: whether it returned at all.
        error: the traceback's text if the body raised.
        error_type: the exception's class name.
        error_text: ``str()`` of the exception.
        exit_code: of the process; negative for a signal.
        hung: still alive at the deadline, hence killed.
        output: stdout and stderr together.
        stacks: Python stacks of all threads at the deadline.
    """

    rank: int
    value: Any = None
    returned: bool = False
    error: str | None = None
    error_type: str | None = None
    error_text: str | None = None
    exit_code: int | None = None
    hung: bool = False
    output: str = ""
    stacks: str = ""

    def describe(self) -> str:
        """Some lines for a failed test."""
        status = "hung" if self.hung else f"exit code {self.exit_code}"
        lines = [f"--- rank {self.rank}: {status}" + (f", {self.error_type}: {self.error_text}" if self.error else "")]
        sections = {"traceback": self.error, "stacks at the deadline": self.stacks, "output": self.output}
        for title, text in sections.items():
            if text:
                lines += [f"{title}:", text.rstrip()[-6000:]]
        return "\n".join(lines)


@dataclass
class _Task:
    """What a rank is told to do; crosses into the process by pickle."""

    body: Body
    kwargs: dict[str, Any]
    rank: int
    world_size: int
    directory: str
    timeout_s: float
    process_group: bool
    num_threads: int | None
    device: str = "cpu"
    env: dict[str, str] = field(default_factory=dict)
    through_excepthook: bool = False


@dataclass
class _Running:
    process: Any
    connection: Connection
    outcome: Outcome
    open: bool = field(default=True)


def run_ranks(
    body: Body,
    world_size: int = 2,
    timeout_s: float = 20,
    expect_exit: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    process_group: bool = True,
    num_threads: int | None = 1,
    device: str = "cpu",
    **kwargs: Any,
) -> list[Any]:
    """Runs ``body(rank, world_size, **kwargs)`` in fresh processes and returns their values in rank order.

    ``process_group=False`` leaves out the group and torchrun's variables; ``num_threads=None`` keeps torch's default.
    ``device``: ``"cpu"``, `SIMULATED` or `REAL`; the last two get a backend for CUDA tensors beside gloo.

    Raises:
        RanksFailedError: if a rank raises, hangs, dies, or ends with a code other than ``expect_exit`` (None means 0).
    """
    outcomes = run_ranks_raw(
        body,
        world_size,
        timeout_s,
        env=env,
        process_group=process_group,
        num_threads=num_threads,
        device=device,
        **kwargs,
    )
    expected = 0 if expect_exit is None else expect_exit
    bad = [outcome for outcome in outcomes if outcome.hung or outcome.exit_code != expected]
    if bad:
        name = getattr(body, "__name__", str(body))
        summary = "; ".join(_summary(outcome) for outcome in bad)
        details = "\n".join(outcome.describe() for outcome in outcomes)
        raise RanksFailedError(f"{name} on {world_size} ranks: {summary} (expected exit code {expected})\n{details}")
    return [outcome.value for outcome in outcomes]


def run_ranks_raw(
    body: Body,
    world_size: int = 2,
    timeout_s: float = 20,
    *,
    env: Mapping[str, str] | None = None,
    process_group: bool = True,
    num_threads: int | None = 1,
    device: str = "cpu",
    through_excepthook: bool = False,
    **kwargs: Any,
) -> list[Outcome]:
    """As `run_ranks`, but every outcome is returned, whatever it is.

    ``through_excepthook``: an exception of the body goes through ``sys.excepthook`` as in a script, which may end the
    process with a code of its own.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        task = _Task(body, kwargs, 0, world_size, directory, timeout_s, process_group, num_threads, device)
        task = dataclasses.replace(task, env=dict(env or {}), through_excepthook=through_excepthook)
        tasks = [dataclasses.replace(task, rank=rank) for rank in range(world_size)]
        deadline = time.monotonic() + timeout_s
        running = [_start(task) for task in tasks]
        _collect(running, deadline)
        _end(running, Path(directory))
        return [rank.outcome for rank in running]


def _summary(outcome: Outcome) -> str:
    if outcome.hung:
        return f"rank {outcome.rank}: hung"
    if outcome.error:
        return f"rank {outcome.rank}: {outcome.error_type}: {outcome.error_text}"
    return f"rank {outcome.rank}: exit code {outcome.exit_code}"


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _start(task: _Task) -> _Running:
    context = _context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(task, sender), daemon=True)
    process.start()
    sender.close()  # so that the death of the rank ends the pipe
    return _Running(process, receiver, Outcome(task.rank))


def _collect(running: list[_Running], deadline: float) -> None:
    """Waits on all pipes together, until each has ended or the deadline has come."""
    while waiting := [rank for rank in running if rank.open]:
        left_s = deadline - time.monotonic()
        ready = multiprocessing.connection.wait([rank.connection for rank in waiting], timeout=max(left_s, 0))
        if not ready:
            return
        for rank in waiting:
            if rank.connection in ready:
                _receive(rank)
    for rank in running:
        rank.process.join(max(deadline - time.monotonic(), 0))


def _receive(rank: _Running) -> None:
    try:
        message = pickle.loads(rank.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        rank.open = False
        return
    for name, value in message.items():
        setattr(rank.outcome, name, value)


def _end(running: list[_Running], directory: Path) -> None:
    """Stacks of the ranks still alive, then the end of all of them."""
    alive = [rank for rank in running if rank.process.is_alive()]
    for rank in alive:
        rank.outcome.hung = True
        os.kill(rank.process.pid, STACK_SIGNAL)
    if alive:
        time.sleep(STACK_WAIT_S)
    for rank in alive:
        rank.process.kill()
    for rank in running:
        rank.process.join()
        rank.connection.close()
        rank.outcome.exit_code = rank.process.exitcode
        rank.outcome.output = _read(directory / f"output-{rank.outcome.rank}.txt")
        rank.outcome.stacks = _read(directory / f"stacks-{rank.outcome.rank}.txt") if rank.outcome.hung else ""
        rank.process.close()


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _rank_main(task: _Task, connection: Connection) -> None:
    """The process of one rank. Ends by ``os._exit``: interpreter exit with live gloo threads may hang or abort."""
    _prepare(task)
    code = 0
    try:
        message = {"value": _run(task), "returned": True}
    except BaseException as error:
        code = 1
        message = {"error": traceback.format_exc(), "error_type": type(error).__name__, "error_text": str(error)}
        _send(connection, message)
        if task.through_excepthook:
            sys.excepthook(*sys.exc_info())
    else:
        _send(connection, message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _send(connection: Connection, message: dict[str, Any]) -> None:
    # plain pickle: torch's own pipe pickler shares file descriptors, which die with the process
    connection.send_bytes(pickle.dumps(message))


def _prepare(task: _Task) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives an aborted pytest
    directory = Path(task.directory)
    descriptor = os.open(directory / f"output-{task.rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    stacks = open(directory / f"stacks-{task.rank}.txt", "w")  # noqa: SIM115  # must stay open for the signal handler
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    faulthandler.enable(file=sys.stderr, all_threads=False)
    os.chdir(directory)
    for name in [name for name in os.environ if name.startswith("NANGUARD_")]:
        del os.environ[name]
    if task.process_group:
        os.environ.update({name: str(task.rank) for name in ("RANK", "LOCAL_RANK")})
        os.environ.update({name: str(task.world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")})
    os.environ.update(task.env)


def _run(task: _Task) -> Any:
    import numpy
    import torch
    import torch.distributed as dist

    if task.num_threads is not None:
        torch.set_num_threads(task.num_threads)
    backend = _backend_for(task.device)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    if task.process_group:
        store = dist.FileStore(str(Path(task.directory) / "store"), task.world_size)
        timeout = timedelta(seconds=task.timeout_s + GROUP_TIMEOUT_MARGIN_S)
        dist.init_process_group(backend, store=store, rank=task.rank, world_size=task.world_size, timeout=timeout)
        # a body may end before a peer has connected
        store.set(f"connected-{task.rank}", "yes")
        store.wait([f"connected-{peer}" for peer in range(task.world_size)])
    try:
        return task.body(task.rank, task.world_size, **task.kwargs)
    finally:
        _require_no_contradictions()


def _backend_for(device: str) -> str:
    if device == SIMULATED:
        from tests.device import staged

        staged.register()
        return f"cpu:gloo,cuda:{staged.NAME}"
    return "cpu:gloo,cuda:nccl" if device == REAL else "gloo"


def _require_no_contradictions() -> None:
    """No report that was made in this process says anything against itself."""
    from ddp_nanguard.report.audit import FOUND

    assert not FOUND, f"a report contradicts itself: {FOUND}"
