"""The list of skipped steps on its own: lines are whole, states are bounded, and a disk that cannot be written to."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.dump.skip_list import MAX_STATE_BYTES, read_skips

INF = float("inf")


class _Loader:
    __slots__ = ("state",)  # and so nothing can refer to it weakly

    def __init__(self, state: Any) -> None:
        self.state = state

    def __iter__(self) -> Any:
        yield torch.ones(2, 4)
        yield torch.full((2, 4), INF)

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state


def _stopped(dump_dir: str | None, loader: Any = None, *, by_guard: bool = True, lr: float = 0.1) -> NonFiniteError:
    """The error of a training over the loader's batches, taken from ``guard.steps`` or not."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    guard = NanGuard(model, optimizer, dump_dir=dump_dir, look_again=False)
    loader = loader if loader is not None else _Loader({})
    try:
        for values in guard.steps(loader) if by_guard else loader:
            guard(values).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except NonFiniteError as error:
        guard.close()
        return error
    raise AssertionError("it was not stopped")


def test_a_state_with_tensors_and_bytes_comes_back_as_it_was(tmp_path: Path) -> None:
    generator = torch.Generator()
    _stopped(str(tmp_path), _Loader({"generator": generator.get_state(), "raw": b"\0\1", "seen": (1, 2)}))
    (line,) = read_skips(str(tmp_path / "skips.jsonl"))
    state = line.state_dict()
    assert (state["raw"], state["seen"]) == (b"\0\1", (1, 2))
    assert torch.equal(state["generator"], generator.get_state())


@pytest.mark.parametrize(
    ("state", "left", "notes"),
    [
        ("x" * MAX_STATE_BYTES, None, [f"left out: {MAX_STATE_BYTES + 45} bytes of JSON, at most 262144 are kept"]),
        (None, None, None),
        (ValueError("no state between two epochs"), None, None),
    ],
)
def test_a_state_that_is_too_large_or_cannot_be_had_is_left_out(
    tmp_path: Path, state: Any, left: Any, notes: Any
) -> None:
    _stopped(str(tmp_path), _Loader(state))
    (line,) = read_skips(str(tmp_path / "skips.jsonl"))
    assert (line.step, line.positions, line.state_dict()) == (1, ((0, 1),), left)
    assert (None if line.loader_state is None else list(line.loader_state.notes)) == notes


def test_batches_that_did_not_come_through_the_guard_have_no_position(tmp_path: Path) -> None:
    _stopped(str(tmp_path), by_guard=False)
    (line,) = read_skips(str(tmp_path / "skips.jsonl"))
    assert (line.step, line.positions) == (1, ())


def test_a_bad_update_is_no_fault_of_the_batch_after_it(tmp_path: Path) -> None:
    error = _stopped(str(tmp_path), [torch.full((2, 4), 100.0)] * 2, lr=1e38)
    assert error.report.origin is not None
    assert str(error.report.origin.phase) == "optimizer"
    (line,) = read_skips(str(tmp_path / "skips.jsonl"))
    assert (line.step, line.positions) == (0, ())


def test_a_list_that_cannot_be_written_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "skips.jsonl").mkdir()
    with caplog.at_level(logging.ERROR, "ddp_nanguard"):
        error = _stopped(str(tmp_path))
    assert error.report.dump_path is not None
    assert [text for text in caplog.messages if "skips.jsonl" in text] == [
        f"skips.jsonl in {tmp_path} lacks step 1: IsADirectoryError: [Errno 21] Is a directory: "
        f"'{tmp_path / 'skips.jsonl'}'"
    ]


def test_without_dumps_there_is_no_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _stopped(None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"\xff\n", "line 1 is no skipped step ("),
        (b"[1]\n", "line 1 is no skipped step (an object is valid, not a list); remove that line"),
        (b'{"action": "stop"}\n', "line 1 is no skipped step (step is missing); remove that line"),
        (
            b'{"action": "stop", "step": -1}\n',
            "line 1 is no skipped step (step is -1, valid is a whole number from 0 to ",
        ),
    ],
)
def test_what_is_no_line_is_named_with_its_number(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "skips.jsonl"
    path.write_bytes(line)
    with pytest.raises(ValueError, match="no skipped step") as raised:
        read_skips(str(path))
    assert str(raised.value).startswith(f"{path}, {said}")


def test_a_list_that_is_a_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read: Is a directory; give a skips\.jsonl of a dump_dir$"):
        read_skips(str(tmp_path))


def test_a_guard_that_is_off_passes_over_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _stopped(str(tmp_path))
    model = nn.Linear(4, 2)
    guard = NanGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), enabled=False)
    path = str(tmp_path / "skips.jsonl")
    with caplog.at_level(logging.WARNING, "ddp_nanguard"):
        assert len(list(guard.steps([1, 2], skip=path))) == 2
    assert caplog.messages[-1] == f"guard.steps(skip={path!r}): the guard is off, no batch is passed over"
    guard.close()
    assert list(guard.steps([1, 2])) == [1, 2]
    with pytest.raises(ValueError, match=r"^steps\(skip=\.\.\.\) after close\(\): the guard is gone; build a new one$"):
        guard.steps([1, 2], skip=path)
