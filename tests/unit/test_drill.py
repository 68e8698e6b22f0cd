"""The drill's reading of commands; the drill itself runs in tests/e2e/test_drill.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_nanguard.cli.drill_job import launcher_end, with_logs
from ddp_nanguard.cli.main import main


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("torchrun --nproc-per-node 2 train.py --lr 1", "train.py"),
        ("/opt/bin/torchrun --standalone --nproc_per_node=2 train.py", "train.py"),
        ("python -m torch.distributed.run --rdzv-backend c10d -r3 -m package.train --nnodes 3", "package.train"),
        ("python -u -m torch.distributed.run --nnodes 1 train.py", "train.py"),
        ("python train.py -m torch.distributed.run x", None),
        ("bash train.sh", None),
    ],
)
def test_the_script_of_a_command_is_found(command: str, script: str | None) -> None:
    words = command.split()
    end = launcher_end(words)
    assert (None if end is None else words[end]) == script


def test_logs_are_asked_for_last_so_that_they_win() -> None:
    words = with_logs(["torchrun", "--max-restarts", "3", "train.py", "--log-dir", "mine"], Path("logs"))
    script = words.index("train.py")
    assert words[script - 4 : script] == [
        "--log-dir=logs",
        "--redirects=3",
        "--max-restarts=0",
        "--monitor-interval=0.1",
    ]
    assert words[script:] == ["train.py", "--log-dir", "mine"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["drill"], "drill needs a command: ddp-nanguard drill -- torchrun"),
        (["drill", "--", "no-such-command", "train.py"], "there is no command 'no-such-command'"),
        (["drill", "--phase", "loss", "--layer", "head", "--", "python", "t.py"], "phase loss belongs to no layer"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1
