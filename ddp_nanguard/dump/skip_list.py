"""``skips.jsonl``: one line for each step that was skipped or that stopped the job, and which batches those were."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_nanguard.report.types import Natural, Rank

from .files import append_json
from .json_files import MAX_JSON_BYTES, parse_json
from .plain_state import packed_state, unpacked_state
from .rank_records import PlainState
from .typed_json import as_json, read_fields

SKIPS = "skips.jsonl"
MAX_STATE_BYTES = 256 * 1024
"""Of a loader's state in one line; a larger one is left out. One with 16 workers takes half of that."""


@dataclass(frozen=True)
class SkippedStep:
    """A line of ``skips.jsonl``.

    Attributes:
        action: ``skip`` or ``stop``.
        step: its number.
        positions: epoch and index of each batch of its window, as the first rank of the group had them; empty where
            the batches did not come through ``guard.steps``, or where the fault is that of an earlier update.
        rank: where the fault began; None where that is no single rank, or not known.
        fingerprint: see `ddp_nanguard.report.fingerprint`.
        fault: what that stands for, in one line.
        dump: path of the dump; None without one.
        loader_state: ``state_dict()`` of the loader when the fault was handled; None where it has none. What was left
            out is in its notes.
        time: ISO 8601 with the offset from UTC.
    """

    action: str
    step: Natural
    positions: tuple[tuple[Natural, Natural], ...]
    rank: Rank | None
    fingerprint: str
    fault: str
    dump: str | None
    loader_state: PlainState | None
    time: str

    def state_dict(self) -> Any:
        """The state of the loader as it gave it, for ``loader.load_state_dict``; None where there is none."""
        return None if self.loader_state is None else unpacked_state(self.loader_state)


def append_skip(dump_dir: str, skipped: SkippedStep) -> None:
    """Append a line to the list in ``dump_dir``, which is made where it is not there.

    Raises:
        OSError: it could not be written.
    """
    os.makedirs(dump_dir, exist_ok=True)
    append_json(Path(dump_dir) / SKIPS, {name: as_json(value) for name, value in vars(skipped).items()})


def bounded_state(state: Any) -> PlainState:
    """A loader's state, or, where it is too large, a note in its place."""
    packed = packed_state(state)
    size_bytes = len(json.dumps(packed.to_dict()))
    if size_bytes <= MAX_STATE_BYTES:
        return packed
    return PlainState(None, {}, (f"left out: {size_bytes} bytes of JSON, at most {MAX_STATE_BYTES} are kept",))


def read_skips(path: str) -> list[SkippedStep]:
    """The lines of a list, in its order; none where there is no such file.

    Raises:
        ValueError: it cannot be read, or a line is none: the line's number, what is wrong and the remedy.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; give a {SKIPS} of a dump_dir") from None
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{path} has more than {MAX_JSON_BYTES} bytes; give a {SKIPS} of a dump_dir")
    return [_skipped(path, number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]


def _skipped(path: str, number: int, line: bytes) -> SkippedStep:
    try:
        return SkippedStep(**read_fields(SkippedStep, parse_json(line.decode())))
    except ValueError as error:
        raise ValueError(f"{path}, line {number} is no skipped step ({error}); remove that line") from None
