"""What ``ddp-nanguard doctor`` looks at: versions, devices, communication, the dump_dir, other checks, the command."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_nanguard.config import ENV_PREFIX, GuardConfig
from ddp_nanguard.distributed.connect import try_gloo
from ddp_nanguard.distributed.fault_group import FaultGroup, PeersLostError
from ddp_nanguard.dump.directories import free_bytes
from ddp_nanguard.dump.manifest import versions
from ddp_nanguard.errors import line_of
from ddp_nanguard.replay import launcher
from ddp_nanguard.report.text import human_size
from ddp_nanguard.report.wording import plural
from ddp_nanguard.tensors.accelerator import accelerator

from .check import Check

CONNECT_S = 60.0
IMPORT_TIMEOUT_S = 120.0
MAX_SHOWN = 3
MAX_SCRIPT_BYTES = 2**20
_TRUE = ("1", "true", "t", "yes", "y")
"""How torch spells that one of its variables is on."""
_OWN_CHECKS = re.compile(
    r"(detect_anomaly|TORCH_NCCL_NAN_CHECK|terminate_on_nan|assert\b.*\b(isnan|isfinite|isinf)\b|check_finite)"
)
"""Code that raises at a NaN before the guard has asked the other ranks."""


def checks_of_all_ranks(dump_dir: str | None, command: Sequence[str]) -> list[Check]:
    """All checks, on rank 0 those of the others too.

    Args:
        dump_dir: that the job gives the guard; None for that of the environment, or the default.
        command: that starts the job; empty for none.

    Collective: none in one process. Under torchrun a gloo group is made, and one all-gather of `gather_data`; every
    rank must call it.
    """
    given, variables = _options(dump_dir)
    directory = dump_dir if given is None else given.dump_dir
    own = [_interpreter(), _torch(), _libraries(), _devices(), _backends(), variables, _nan_check(), _interfaces()]
    own += [_threads(), *_of_command(command), _writable(directory)]
    return [*own, _gloo_alone()] if launcher.world_size() == 1 else [*own, *_of_peers(own)]


# -- versions ----------------------------------------------------------------------------------------------------------


def _interpreter() -> Check:
    found = sys.version_info[:3]
    return Check("python", found >= (3, 11), f"{'.'.join(map(str, found))}, {sys.executable}; needed: 3.11 or newer")


def _torch() -> Check:
    needed = next(iter(re.findall(r"^torch>=([\d.]+)", "\n".join(_requirements()), flags=re.MULTILINE)), None)
    detail = f"{torch.__version__}; needed: {needed or 'not known: ddp-nanguard is not installed'}"
    return Check("torch", None if needed is None else _numbers(torch.__version__) >= _numbers(needed), detail)


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("ddp-nanguard") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _libraries() -> Check:
    found = {name: text for name, text in versions().items() if name not in ("torch", "python", "byteorder")}
    return Check("versions", None, ", ".join(f"{name} {text}" for name, text in found.items()))


def _devices() -> Check:
    device, cores = accelerator(), f"{os.cpu_count()} CPU cores"
    if device is not None:
        return Check("devices", True, f"{torch.accelerator.device_count()} x {device.type}, {cores}")
    built_for = f"; this torch is built for CUDA {torch.version.cuda}, and sees no GPU" if torch.version.cuda else ""
    return Check("devices", None if built_for else True, f"{cores}, no accelerator{built_for}")


def _backends() -> Check:
    if not dist.is_available():
        return Check("backends", None, "this torch has no torch.distributed: the guard works in one process")
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return Check("backends", True, ", ".join(name for name, is_there in there.items() if is_there) or "none")


# -- the environment ---------------------------------------------------------------------------------------------------


def _options(dump_dir: str | None) -> tuple[GuardConfig | None, Check]:
    """The options as the guard would have them, None where a variable does not fit; and what is to be said of them."""
    name = "NANGUARD_ variables"
    try:
        options = GuardConfig.from_code_and_environment({} if dump_dir is None else {"dump_dir": dump_dir})
    except ValueError as error:
        return None, Check(name, False, line_of(error))
    given = sorted(key for key in os.environ if key.startswith(ENV_PREFIX))
    text = ", ".join(f"{key}={os.environ[key]}" for key in given) or "none is set"
    return options, Check(name, options.enabled, text if options.enabled else f"{text}: the guard is switched off")


def _nan_check() -> Check:
    name = "TORCH_NCCL_NAN_CHECK"
    is_on = os.environ.get(name, "").lower() in _TRUE
    detail = f"{name} is on: it aborts a rank in its reduce, before the guard can ask the others; unset it"
    return Check("other NaN checks", not is_on, detail if is_on else f"{name} is off")


def _interfaces() -> Check:
    """Of the network: what NCCL was told and gloo was not, and names that this machine does not have."""
    name = "network interfaces"
    nccl, gloo = os.environ.get("NCCL_SOCKET_IFNAME"), os.environ.get("GLOO_SOCKET_IFNAME")
    if nccl is not None and gloo is None:
        remedy = f"GLOO_SOCKET_IFNAME is not set, NCCL_SOCKET_IFNAME={nccl} is; set both to one interface"
        return Check(name, False, remedy)
    there = {name for _, name in socket.if_nameindex()}
    missing = [each for each in (gloo or "").split(",") if each and each not in there]
    told = f"GLOO_SOCKET_IFNAME={gloo}" if gloo is not None else "neither GLOO_ nor NCCL_SOCKET_IFNAME is set"
    has = f"; this machine has {', '.join(sorted(there))}" if missing else ""
    return Check(name, not missing, told + has)


def _threads() -> Check:
    text, cores = os.environ.get("OMP_NUM_THREADS"), os.cpu_count() or 1
    if text is None:
        return Check("OMP_NUM_THREADS", None, f"not set: torchrun sets 1, and one process alone takes {cores}")
    num_ranks = launcher.local_world_size()
    threads = int(text) * num_ranks if text.isdigit() else 0
    detail = f"{text}, {plural(num_ranks, 'rank')} here, {cores} cores"
    return Check("OMP_NUM_THREADS", True if 0 < threads <= cores else None, detail)


# -- communication and files -------------------------------------------------------------------------------------------


def _gloo_alone() -> Check:
    try:
        try_gloo()
    except Exception as error:  # of any kind, by what the network is like
        return Check("gloo", False, f"{line_of(error)}; set GLOO_SOCKET_IFNAME to a network interface of this machine")
    return Check("gloo", True, "connects in one process; for all ranks: torchrun ... -m ddp_nanguard doctor")


def _of_peers(own: Sequence[Check]) -> list[Check]:
    """Whether gloo connects all ranks, and what does not hold on the others."""
    size, failed = (
        f"{launcher.world_size()} ranks",
        [f"{check.promise}: {check.detail}" for check in own if check.holds is False],
    )
    try:
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=CONNECT_S))
        told = FaultGroup(dist.group.WORLD).gather_data({"host": [socket.gethostname()], "failed": failed})
    except (PeersLostError, RuntimeError) as error:
        return [Check("gloo", False, f"{size}: {line_of(error)}; set GLOO_SOCKET_IFNAME on every node")]
    hosts = {data["host"][0] for data in told if data["host"]}
    others = [(rank, data["failed"]) for rank, data in enumerate(told) if rank != launcher.rank()]
    rows = [Check(f"rank {rank}", False, "; ".join(lines)) for rank, lines in others if lines]
    return [Check("gloo", True, f"connects {size} on {plural(len(hosts), 'host')}"), *rows]


def _writable(directory: str | None) -> Check:
    """Whether a dump could be written; nothing stays behind, not even the directory."""
    name = "dump_dir"
    if directory is None:
        return Check(name, None, "None: no dumps are written")
    path = Path(directory).absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            free = free_bytes(there)
    except OSError as error:
        return Check(name, False, f"{path}: {error.strerror} in {there}; set dump_dir= or NANGUARD_DUMP_DIR")
    return Check(name, True, f"{path}: can be written, {human_size(free)} free")


# -- the command of the job --------------------------------------------------------------------------------------------


def _of_command(command: Sequence[str]) -> Iterator[Check]:
    if not command:
        return
    program = shutil.which(command[0])
    if program is None:
        yield Check("command", False, f"there is no command {command[0]!r}; give what starts the job")
        return
    interpreter = _interpreter_of(Path(program))
    if interpreter is not None and not _is_this_one(interpreter):
        yield _other_interpreter(interpreter)
    script = next((Path(word) for word in command[1:] if word.endswith(".py")), None)
    if script is not None:
        yield _script(script)


def _interpreter_of(program: Path) -> Path | None:
    """The interpreter that a command runs, or that lies beside torchrun; None for any other command."""
    if program.name.startswith("python"):
        return program
    beside = program.with_name("python")
    return beside if program.name == "torchrun" and beside.exists() else None


def _is_this_one(interpreter: Path) -> bool:
    """Whether it is that of this process: of the same environment, whose interpreter has several names."""
    own = Path(sys.executable).absolute()
    return interpreter.absolute().parent == own.parent and interpreter.resolve() == own.resolve()


def _other_interpreter(interpreter: Path) -> Check:
    """Whether the interpreter of the job has the package, and which torch."""
    name, code = "interpreter of the job", "import torch, ddp_nanguard.guard; print(torch.__version__)"
    try:
        ended = subprocess.run(
            [interpreter, "-c", code], capture_output=True, text=True, check=False, timeout=IMPORT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name, False, f"{interpreter}: {line_of(error)}")
    if ended.returncode != 0:
        why = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        return Check(name, False, f"{interpreter}: {why}; install ddp-nanguard there")
    return Check(name, True, f"{interpreter}: torch {ended.stdout.strip()}; doctor runs in {sys.executable}")


def _script(script: Path) -> Check:
    """What the text of the script shows: whether there is a guard, and other checks that would raise first."""
    try:
        with script.open(errors="replace") as file:
            lines = file.read(MAX_SCRIPT_BYTES).splitlines()
    except OSError as error:
        return Check("script", False, f"{script}: {error.strerror}; give its path as from here")
    found = [
        f"{script.name}:{number}: {line.strip()[:80]}"
        for number, line in enumerate(lines, 1)
        if _OWN_CHECKS.search(line.partition("#")[0])
    ]
    guard = "" if any("NanGuard" in line for line in lines) else "no NanGuard in this file; "
    told = f"may raise first, on one rank: {'; '.join(found[:MAX_SHOWN])}" if found else "no NaN check of its own"
    return Check("script", None if guard or found else True, f"{guard}{told}")
