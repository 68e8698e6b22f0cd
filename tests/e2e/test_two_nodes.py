"""Two nodes for real: two network namespaces and the cable between them, an agent of torchrun in each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.exits import environment, messages_of

JOB = Path(__file__).with_name("two_nodes_job.py")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
TIMEOUT_S = 50


def _ip(*words: str) -> None:
    ended = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.skip(f"ip {' '.join(words)}: {ended.stderr.strip()}")


@contextmanager
def _nodes() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces that reach each other, by an interface of the same name; gone at the end."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces take root and iproute2")
    names = f"nanguard-{os.getpid()}-0", f"nanguard-{os.getpid()}-1"
    ends = f"ng{os.getpid()}a", f"ng{os.getpid()}b"
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            _ip("-n", name, "link", "set", end, "name", "cable")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for interface in ("lo", "cable"):
                _ip("-n", name, "link", "set", interface, "up")
        yield names
    finally:
        for name in names:  # with both ends of the cable
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _start(name: str, number: int, directory: Path) -> subprocess.Popen[str]:
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}", "--max-restarts=0"]
    agent += ["--nproc-per-node=1", f"--master-addr={ADDRESSES[0]}", "--master-port=29500", "--monitor-interval=0.1"]
    run = [sys.executable, "-m", "ddp_nanguard", "run", f"--termination-log={directory / f'last-words-{number}'}", "--"]
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *run, *agent, str(JOB), str(directory / "dumps")],
        env={**environment(), "GLOO_SOCKET_IFNAME": "cable", "TORCH_TRACE": str(directory / "trace")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(agents: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and output of each; no agent is left, whatever happens."""
    try:
        outputs = [agent.communicate(timeout=TIMEOUT_S)[0] for agent in agents]
        return [(agent.returncode, output) for agent, output in zip(agents, outputs, strict=True)]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait()


def _traced(directory: Path) -> list[dict[str, object]]:
    """What each rank has left for tlparse about a fault, by rank."""
    lines = [path.read_text().splitlines() for path in sorted(directory.glob("*rank_*.log"))]
    return [
        json.loads("\n".join(text.removeprefix("\t") for text in rank[place + 1 :]).partition("\nV")[0])
        for rank in lines
        for place, line in enumerate(rank)
        if '"name": "nanguard_fault"' in line
    ]


def test_both_nodes_stop_in_one_step_and_tell_their_schedulers(tmp_path: Path) -> None:
    with _nodes() as names:
        ended = _finish([_start(name, number, tmp_path) for number, name in enumerate(names)])
    assert [code for code, _ in ended] == [65, 65], ended
    first, second = messages_of([output for _, output in ended])
    assert first is not None and first == second and first.startswith("NonFiniteError: rank 1, step 2"), ended
    (dump,) = (tmp_path / "dumps").glob("step-*")
    assert sorted(path.parent.name for path in dump.glob("rank-*/evidence.json")) == ["rank-00000", "rank-00001"]
    for number in range(2):  # also the node none of whose ranks is the culprit
        assert (tmp_path / f"last-words-{number}").read_text() == first
    traced = _traced(tmp_path / "trace")
    assert [told["step"] for told in traced] == [2, 2] and traced[0] == traced[1]
