"""Fixtures for every test: nothing may leak into the environment, the working directory or the process table."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from ddp_nanguard.report import audit
from tests.device import simulated_cuda
from tests.rank_processes import SIMULATED

REPOSITORY = Path(__file__).parent.parent
ALLOWED_NEW = {".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache", "__pycache__", ".coverage"}
NOT_OURS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_")  # pytest and torch set these themselves


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """As in the ranks: a second thread makes an operator on a few numbers slower, by far where cores are busy."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_contradictions() -> Iterator[None]:
    """No report and no replay of any test says anything against itself; ranks are asked in `rank_processes`."""
    audit.FOUND.clear()
    yield
    assert not audit.FOUND, f"a report contradicts itself: {audit.FOUND}"


@pytest.fixture(autouse=True)
def _no_environment_leak() -> Iterator[None]:
    before = _environment()
    yield
    after = _environment()
    os.environ.update(before)
    for name in after.keys() - before.keys():
        del os.environ[name]
    assert after == before, f"the test changed the environment: {sorted(set(after.items()) ^ set(before.items()))}"


@pytest.fixture(autouse=True)
def _no_stray_files() -> Iterator[None]:
    before = set(os.listdir(REPOSITORY)) | set(os.listdir())
    yield
    stray = (set(os.listdir(REPOSITORY)) | set(os.listdir())) - before - ALLOWED_NEW
    assert not stray, f"the test left files behind: {sorted(stray)}"


@pytest.fixture(autouse=True)
def _no_stray_processes() -> Iterator[None]:
    before = set(_descendants(os.getpid()))
    yield
    stray = {pid: command for pid, command in _descendants(os.getpid()).items() if pid not in before}
    for pid in stray:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not stray, f"the test left processes behind: {stray}"


@pytest.fixture(scope="session")
def simulated() -> str:
    """The simulated device, built; for tests of what a real one does not let see."""
    if reason := simulated_cuda.missing():
        pytest.skip(reason)
    simulated_cuda.build()
    return SIMULATED


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(NOT_OURS)}


def _descendants(root: int) -> dict[int, str]:
    """Live processes below ``root`` with their commands; multiprocessing's own two servers are left out."""
    found = {}
    waiting = [child for child in _children(root) if not _is_server(child)]
    waiting += [grandchild for child in _children(root) if _is_server(child) for grandchild in _children(child)]
    while waiting:
        pid = waiting.pop()
        if not _is_zombie(pid):
            found[pid] = _command(pid)
            waiting += _children(pid)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in path.read_text().split()]
    return found


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def _is_server(pid: int) -> bool:
    command = _command(pid)
    return "multiprocessing.forkserver" in command or "multiprocessing.resource_tracker" in command


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
