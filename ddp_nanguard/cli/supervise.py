"""``ddp-nanguard run``: the command of a job, whatever launches it, with the exit code of its stopped ranks.

[Note: the exit code of a job]
Launchers return 1 whatever their workers return, and a scheduler cannot tell a NaN from a lost node by that. Nothing is
parsed here: each stopped rank leaves a file in a directory whose name it finds in its environment
(`distributed.launcher`), before it meets its peers, and so before any launcher can end it. Each node runs its own
``ddp-nanguard run``, and finds what the ranks of that node have left: the guard stops all ranks, so all nodes agree. A
command that ends with 0 has gone on all the same, and a rank that makes a guard anew, after a restart, has forgotten.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ddp_nanguard.distributed.launcher import ENV_RUN, Stop, read_stop
from ddp_nanguard.errors import DumpError

from .arguments import job_of

TERMINATION_LOG = "/dev/termination-log"
"""Where Kubernetes looks for a container's last words, unless the pod says otherwise."""
MAX_TERMINATION_BYTES = 4096
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_SIGNALS = {*_FORWARDED, signal.SIGCHLD}
_AS_BEFORE_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)


def run_job(options: argparse.Namespace) -> int:
    """Run ``ddp-nanguard run -- COMMAND``. Returns the exit code.

    Raises:
        DumpError: no command, or one that cannot be started, or a termination log that cannot be written.
    """
    command = job_of(options)
    if not command:
        raise DumpError("give the command of the job: ddp-nanguard run -- torchrun --nproc-per-node N train.py ...")
    log = _termination_log(options.termination_log)
    directory = Path(tempfile.mkdtemp(prefix="nanguard-run-"))
    try:
        with _signals_held():
            code = supervise(command, {**os.environ, ENV_RUN: str(directory)})
            stop = read_stop(directory) if code else None
            return code if stop is None else _stopped(stop, code, log)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def supervise(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end and hand on the signals that other processes send.

    It has this process's standard streams, process group and terminal. What the terminal sends goes to the whole group
    anyway. To be called within `_signals_held`.

    Returns:
        Its exit code, 128 + n for signal n.

    Raises:
        DumpError: it cannot be started.
    """
    try:
        child = os.posix_spawnp(
            command[0],
            list(command),
            environment,
            setsigmask=_unheld(),
            setsigdef=_AS_BEFORE_PYTHON,
        )
    except OSError as error:
        raise DumpError(f"{command[0]}: {error.strerror}; give a command as the shell would find it") from None
    while True:
        told = signal.sigwaitinfo(_SIGNALS)
        if told.si_signo == signal.SIGCHLD:
            if (code := _ended(child)) is not None:
                return code
        elif told.si_code <= 0:  # sent by a process; above 0 are those of the terminal
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, told.si_signo)


def _ended(child: int) -> int | None:
    """Exit code of the child; None while it runs. As process 1 of a container also the end of all orphans."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1 if os.getpid() == 1 else child, os.WNOHANG))[0]:
            if found[0] == child:
                code = os.waitstatus_to_exitcode(found[1])
    return 128 - code if code is not None and code < 0 else code


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Signals wait until they are asked for; those that nobody has asked for by then came too late."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, no child's end would be told
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        while signal.sigtimedwait(_SIGNALS, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGCHLD, handler)


def _unheld() -> set[signal.Signals | int]:
    return {each for each in signal.pthread_sigmask(signal.SIG_BLOCK, ()) if each not in _SIGNALS}


def _stopped(stop: Stop, code: int, log: Path | None) -> int:
    if log is not None:
        with contextlib.suppress(OSError):  # nothing may cost the exit code
            log.write_bytes(_cut(stop.text.encode(errors="replace")))
    if code != stop.exit_code:
        line = f"ddp-nanguard: the guard stopped this job: exit code {stop.exit_code}, the command's own is {code}"
        print(line, file=sys.stderr, flush=True)
    return stop.exit_code


def _cut(text: bytes) -> bytes:
    """At most what Kubernetes keeps, which is the end; an error begins with what matters."""
    return text[:MAX_TERMINATION_BYTES].decode(errors="ignore").encode()


def _termination_log(given: str | None) -> Path | None:
    if given is None:
        return Path(TERMINATION_LOG) if os.access(TERMINATION_LOG, os.W_OK) else None
    try:
        with open(given, "ab"):
            return Path(given)
    except OSError as error:
        raise DumpError(
            f"option --termination-log={given}: {error.strerror}; give a file that can be written"
        ) from None
