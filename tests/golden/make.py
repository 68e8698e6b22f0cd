"""Makes the golden dump again: ``python -m tests.golden.make``, after a change to the form and to `SCHEMA_VERSION`.

A real dump of two ranks, in which nothing is left of the machine that wrote it: host, paths, times and ids are made up,
and the checksums are taken anew.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.dump.files import list_file
from tests.golden import GOLDEN
from tests.golden.recipe import BAD_STEP, Net, batch_of, step
from tests.rank_processes import run_ranks

REPOSITORY = Path(__file__).parents[2]
WORLD_SIZE = 2
MADE_UP_RUN = {
    "TORCHELASTIC_RUN_ID": "golden",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
MADE_UP_LAUNCHER = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "set"}
MADE_UP_WRITER = {"host": "golden", "pid": 1, "time": 0.0, "nonce": "golden"}
CREATED = "2026-01-01T00:00:00+0000"


def train(rank: int, world_size: int, dump_dir: str) -> str | None:
    """Into the fault; the path of its dump."""
    _hide_machine()
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)  # weights stay small whole numbers
    options = {"layers": "every", "history": 2}
    guard = NanGuard(model, optimizer, dump_dir=dump_dir, replay="tests.golden.recipe:recipe", **options)
    try:
        for batch in guard.steps([batch_of(rank, index) for index in range(BAD_STEP + 1)]):
            loss = step(guard, batch)
            guard.watch(loss=loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except NonFiniteError as error:
        return error.report.dump_path
    return None


def _hide_machine() -> None:
    os.environ.update(MADE_UP_RUN)
    socket.gethostname = lambda: "golden"
    platform.platform = lambda aliased=False, terse=False: "Linux"
    sys.argv = ["train.py"]


def make(target: Path) -> None:
    """Writes the dump to ``target``, in place of what is there."""
    with tempfile.TemporaryDirectory() as root:
        dump, other = run_ranks(train, WORLD_SIZE, dump_dir=f"{root}/nan_dumps")
        assert dump == other and dump is not None
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(dump, target)
        _hide_paths(target, {f"{root}/": "/job/", str(REPOSITORY): "/job"})
    _edit(target / "writer.json", MADE_UP_WRITER)
    run = json.loads((target / "manifest.json").read_text())["run"]
    run |= {"command": ["python", "train.py"], "directory": "/job", "launcher": MADE_UP_LAUNCHER}
    _edit(target / "manifest.json", {"created": CREATED, "run": run})
    _list_again(target)


def _hide_paths(dump: Path, names: dict[str, str]) -> None:
    for file in [*dump.rglob("*.json"), *dump.rglob("*.txt")]:
        text = file.read_text()
        for real, made_up in names.items():
            text = text.replace(real, made_up)
        file.write_text(text)
    report = dump / "report.txt"
    lines = report.read_text().splitlines(keepends=True)
    report.write_text("".join(f"  written   {CREATED}\n" if line.startswith("  written ") else line for line in lines))


def _edit(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}, indent=1) + "\n")


def _list_again(dump: Path) -> None:
    for file in [*sorted(dump.glob("rank-*/files.json")), dump / "manifest.json"]:
        listed = json.loads(file.read_text())["files"]
        _edit(file, {"files": [list_file(dump, entry["path"]).to_dict() for entry in listed]})
    files = json.loads((dump / "manifest.json").read_text())["files"]
    size_bytes = sum(entry["size_bytes"] for entry in files if entry["path"] != "report.txt")
    _edit(dump / "manifest.json", {"size_bytes": size_bytes})


if __name__ == "__main__":
    make(GOLDEN)
    print(f"{GOLDEN}: {sum(file.stat().st_size for file in GOLDEN.rglob('*') if file.is_file())} bytes")
