"""`write_dump`: the dump of one fault, by all ranks together, or by one rank whose peers cannot be reached.

Together: agree on a name; every rank's own files; ``state/``; ``rank-*/files.json``; then, per directory, its lowest
rank writes the manifest and drops ``.partial``. Nodes with a dump_dir of their own thereby list what they hold.

Alone (no group, or a collective failed): ``own.safetensors`` holds all that the rank has. Such ranks of one run meet in
one directory without talking to each other.

Errors of the disk never raise: each is one line in `DumpResult.problems`, on every rank.
"""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ddp_nanguard.distributed.fault_group import FaultGroup, PeersLostError
from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.text import human_size

from . import directories as place
from .files import list_file, sync_directory
from .format import check_header
from .manifest import Outcome, write_shared_files
from .names import MANIFEST, STATE_DIR, DumpName, FileEntry, rank_name, ranks_in
from .progress import Progress
from .rank_files import Problems, RankFiles, reason, tensor_bytes
from .request import DumpRequest, DumpResult
from .state import save_state
from .tensor_digest import DIGEST_BYTES, digests

__all__ = ["DumpRequest", "DumpResult", "write_dump"]

KEY_BYTES = 8
ROW_BYTES = KEY_BYTES + DIGEST_BYTES
"""A row of the table of replicas: 8 bytes that stand for name and place of a piece, 8 for its content."""
MAX_NAMES = 8
"""Names of differing tensors that each rank tells its peers."""
NO_SPACE = "left out for lack of space"


def write_dump(request: DumpRequest) -> DumpResult:
    """Writes the dump of one fault.

    Collective: over ``request.group`` (gloo), by all its ranks in the same order: some reductions and gathers of a few
    integers, one all_reduce of ``16 * num_shards * pieces`` bytes where there are replicas, the planning of
    torch.distributed.checkpoint, two all_gathers of 1 KiB per rank. None with ``group=None``.
    Host sync: all that is written is copied to the host, at most `COPY_BYTES` at a time.
    """
    if request.config.dump_dir is None:
        return DumpResult(None)
    if request.group is None and request.world_size > 1:
        return _Alone(request, request.why_alone).write()
    together = _Together(request, Path(request.config.dump_dir).absolute())
    try:
        return together.write()
    except PeersLostError as error:
        why = f"a peer was lost: {error}"
    except Exception as error:  # a defect here must not replace the fault that is to be reported
        why = f"writing together failed: {reason(error)}"
    return together.finished() or _Alone(request, why, together.path).write()


class _Together:
    """One rank's part in a dump that all ranks write."""

    def __init__(self, request: DumpRequest, root: Path) -> None:
        self.request = request
        self.root = root
        self.group = FaultGroup(request.group)
        self.ranks: list[int] = []  # global ranks in the group's order
        self.sharing: list[int] = []  # ranks that see the same directory
        self.name = DumpName(request.report.step)
        self.path: Path | None = None  # of the partial dump; None on a rank that has no directory
        self.problems = Problems()
        self.weights_problem: str | None = None
        self.differing: list[str] = []

    def write(self) -> DumpResult:
        self._reserve()
        if not self._meet():
            return DumpResult(None, 0, self._tell().problems)
        files = RankFiles(self.request, self.problems)
        sizes_bytes = self._exchange_sizes(files)
        skip_state = self._lacks_space(sizes_bytes)
        with self.group.waiting_for(list(sizes_bytes.values()), self.request.config.timeout_s):
            with _progress(self.request, sizes_bytes[self.request.rank]) as progress:
                files.tell = progress.tell
                self._write_files(files, skip_state)
            return self._finish(self._tell())

    def _write_files(self, files: RankFiles, skip_state: bool) -> None:
        own = self._own_names()
        if self.path is not None:
            files.write(self.path / rank_name(self.request.rank), own)
        self._write_state(files, skip_state)
        if self.path is not None:
            files.write_list(self.path / rank_name(self.request.rank))

    def finished(self) -> DumpResult | None:
        """The whole dump, if the leader was done before the connection broke."""
        path = self.root / str(self.name)
        if self.path is None or self.path.exists() or not place.is_whole(path):
            return None
        return DumpResult(str(path), place.size_of(path), self.problems.lines)

    # the directory

    def _reserve(self) -> None:
        """Agrees on a name that is free on every node, and makes or joins its directory."""
        number = self.problems.guard(f"no dump in {self.root}", self._first_free_number) or 1
        while True:
            (number,) = self.group.largest(number)
            self.name = DumpName(self.request.report.step, number)
            nonce = self._agree_on_nonce()
            (conflict,) = self.group.largest(int(self._reserve_in_turn(nonce)))
            if not conflict:
                return
            place.release(self.root, self.name, nonce)
            self.path, number = None, number + 1

    def _first_free_number(self) -> int:
        self.root.mkdir(parents=True, exist_ok=True)
        return place.free_number(self.root, self.request.report.step)

    def _agree_on_nonce(self) -> str:
        mine = uuid.uuid4().int >> 66 if self.group.rank == 0 else 0
        return f"{self.group.largest(mine)[0]:x}"

    def _reserve_in_turn(self, nonce: str) -> bool:
        """The group's first rank first, so that others find its directory where they share it. Whether it was taken."""
        taken = self._is_taken(nonce) if self.group.rank == 0 else False
        self.group.largest(0)
        return taken if self.group.rank == 0 else self._is_taken(nonce)

    def _is_taken(self, nonce: str) -> bool:
        if self.problems.lines:
            return False
        claimed = self.problems.guard(f"no dump in {self.root}", lambda: place.reserve(self.root, self.name, nonce))
        if claimed:
            self.path = self.root / str(DumpName(self.name.step, self.name.number, partial=True))
        return claimed is False

    def _meet(self) -> bool:
        """Makes this rank's directory and looks who shares the dump's; False if no rank has any."""
        if self.path is not None and not self.problems.guard(f"no dump in {self.root}", self._make_rank_directory):
            self.path = None
        table = self.group.gather_numbers(self.request.rank, int(self.path is not None))
        self.ranks = [rank for rank, _ in table]
        self.sharing = self.problems.guard("ranks unknown", self._visible_ranks) or []
        return any(has_path for _, has_path in table)

    def _make_rank_directory(self) -> bool:
        assert self.path is not None
        (self.path / rank_name(self.request.rank)).mkdir()
        return True

    def _visible_ranks(self) -> list[int]:
        return ranks_in(self.path) if self.path is not None else []

    @property
    def _leads(self) -> bool:
        return bool(self.sharing) and self.request.rank == self.sharing[0]

    # what is written

    def _exchange_sizes(self, files: RankFiles) -> dict[int, int]:
        """What each rank is going to write, in bytes."""
        request = self.request
        state = tensor_bytes(shard.tensor for shard in request.state) if request.replica_index == 0 else 0
        table = self.group.gather_numbers(request.rank, files.size_bytes + state)
        return {rank: size_bytes for rank, size_bytes in table}  # noqa: C416  # lists, which dict() takes but mypy does not

    def _lacks_space(self, sizes_bytes: dict[int, int]) -> bool:
        """Whether ``state/`` must be left out, on any rank, for lack of space."""
        needed = sum(size for rank, size in sizes_bytes.items() if rank in self.sharing)
        free = self.problems.guard("free space unknown", lambda: place.free_bytes(self.root)) if self._leads else None
        lacking = free is not None and free < needed
        if lacking:
            self.problems.add_lack(_lack(needed, free or 0, self.root))
        (skip,) = self.group.largest(int(lacking))
        return bool(skip)

    def _own_names(self) -> set[str]:
        """Names of pieces that this rank keeps itself: damaged ones and those that differ from replica 0's."""
        request = self.request
        replicas, most = self.group.largest(request.replica_index, len(request.state))
        if replicas == 0 or most == 0:
            return set()
        rows = self.problems.guard("replicas not compared", lambda: _rows(request))
        table = torch.zeros((request.num_shards, most, ROW_BYTES), dtype=torch.uint8, device="cpu")
        if rows and request.replica_index == 0:
            table[request.shard_index, : len(rows)] = torch.frombuffer(
                bytearray(b"".join(rows)), dtype=torch.uint8
            ).view(-1, ROW_BYTES)
        self.group.reduce_tensor(table, dist.ReduceOp.SUM)
        own = {shard.name for shard in request.state if shard.name in request.damaged}
        return own | self._differing_from(table[request.shard_index], rows or [])

    def _differing_from(self, reference: torch.Tensor, rows: list[bytes]) -> set[str]:
        if self.request.replica_index == 0:
            return set()
        known = {bytes(row[:KEY_BYTES]): bytes(row[KEY_BYTES:]) for row in reference.numpy()}
        own = set()
        for shard, row in zip(self.request.state, rows, strict=False):
            theirs = known.get(row[:KEY_BYTES])
            if theirs != row[KEY_BYTES:]:
                own.add(shard.name)
                self.differing += [shard.name] if theirs is not None else []
        return own

    def _write_state(self, files: RankFiles, skip: bool) -> None:
        (num_pieces,) = self.group.largest(len(self.request.state))
        if skip or num_pieces == 0:
            self.weights_problem = NO_SPACE if skip else "not asked for"
            return
        written: list[FileEntry] = []
        try:
            written = save_state(self.request.state, self.path, self.request.rank, self.group.group, files.tell)
        except CheckpointException as error:
            self._state_failed(error, files)
        except RuntimeError as error:
            raise PeersLostError(reason(error)) from error
        if self.path is not None:
            directory = self.path / STATE_DIR
            self.problems.guard("state/ not checked", lambda: self._check_state(directory, written, files))

    def _state_failed(self, error: CheckpointException, files: RankFiles) -> None:
        """Some rank could not write; all ranks are here, with the same error."""
        failures = {group_rank: failure for group_rank, (failure, _) in error.failures.items()}
        first = min(failures)
        self.weights_problem = f"rank {self.ranks[first]}: {reason(failures[first])}"
        mine = failures.get(self.group.rank)
        if mine is not None and not self.problems.lines:
            self.problems.note("state/ not written", mine)
        of_the_disk = any(isinstance(failure, OSError) for failure in failures.values())
        if not of_the_disk and self.request.replica_index == 0 and self.path is not None:
            # what could not be written together each rank writes for itself
            files.write_own(self.path / rank_name(self.request.rank), self.request.state)

    def _check_state(self, directory: Path, written: list[FileEntry], files: RankFiles) -> None:
        """Lists this rank's shards that can be reopened and removes the others."""
        listed = {Path(entry.path).name: entry for entry in written}
        left = {path.name for path in directory.glob(f"shard-{self.request.rank:05d}-*")}
        for name in sorted({*listed, *left}):
            try:
                check_header(directory / name)
                entry = listed.get(name) or list_file(directory.parent, f"{STATE_DIR}/{name}")
                files.entries[entry.path] = entry
            except (DumpError, OSError) as error:
                (directory / name).unlink(missing_ok=True)
                self.weights_problem = self.weights_problem or f"rank {self.request.rank}: {reason(error)}"
        sync_directory(directory)

    # the end

    def _tell(self) -> Outcome:
        """Every rank's problems, on every rank."""
        more = [f"and {len(self.differing) - MAX_NAMES} more"] if len(self.differing) > MAX_NAMES else []
        said = self.group.gather_data(
            {
                "problems": self.problems.lines,
                "differ": self.differing[:MAX_NAMES] + more,
                "weights": [self.weights_problem] if self.weights_problem else [],
            }
        )
        weights = [line for data in said for line in data["weights"]]
        problems = self._by_rank([data["problems"] for data in said])
        differ = [
            f"rank {rank}: {name}" for rank, data in zip(self.ranks, said, strict=True) for name in data["differ"]
        ]
        return Outcome(False, weights[0] if weights else None, problems, differ)

    def _by_rank(self, lines_by_rank: list[list[str]]) -> list[str]:
        """Problems of all ranks, each once, with the ranks that have it."""
        ranks_by_line: dict[str, list[int]] = {}
        for rank, lines in zip(self.ranks, lines_by_rank, strict=True):
            for line in lines:
                ranks_by_line.setdefault(line, []).append(rank)
        if len(self.ranks) == 1:
            return list(ranks_by_line)
        return [f"{_name_ranks(ranks, len(self.ranks))}: {line}" for line, ranks in ranks_by_line.items()]

    def _finish(self, outcome: Outcome) -> DumpResult:
        late = Problems()
        final = late.guard("dump stays partial", lambda: self._make_final(outcome)) if self._leads else None
        ends = self.group.gather_data({"problems": late.lines, "number": [str(final.number)] if final else []})
        problems = outcome.problems or self._by_rank([end["problems"] for end in ends])
        path = self.path
        if self.path is not None:
            numbers = {rank: end["number"] for rank, end in zip(self.ranks, ends, strict=True)}[self.sharing[0]]
            path = self.root / str(DumpName(self.name.step, int(numbers[0]))) if numbers else self.path
        size_bytes = late.guard("size unknown", lambda: place.size_of(path)) if path is not None else 0
        return DumpResult(
            str(path) if path else None, size_bytes or 0, problems, outcome.replicas_disagree, self._leads
        )

    def _make_final(self, outcome: Outcome) -> DumpName:
        assert self.path is not None
        write_shared_files(self.request, self.path, self.root / str(self.name), outcome)
        sync_directory(self.path)
        name = place.finish(self.root, self.name)
        place.point_latest(self.root / str(name))
        sync_directory(self.root)
        place.rotate(self.root, self.request.config.dump_keep, self.root / str(name))
        return name


class _Alone:
    """One rank's part without any peer.

    Args:
        request: of this rank.
        why: there is no peer.
        partial: directory of a dump begun together, which this one replaces.
    """

    def __init__(self, request: DumpRequest, why: str, partial: Path | None = None) -> None:
        assert request.config.dump_dir is not None
        self.request = request
        self.root = Path(request.config.dump_dir).absolute()
        self.why = why
        self.partial = partial
        self.problems = Problems()

    def write(self) -> DumpResult:
        dump = self.problems.guard(f"no dump in {self.root}", self._write_rank)
        if dump is None:
            return DumpResult(None, 0, self.problems.lines)
        self.problems.guard("no manifest", lambda: self._write_manifest(dump))
        if self.partial is not None:
            place.abandon(self.partial, self.request.rank)
        self.problems.guard("no rotation", lambda: place.rotate(self.root, self.request.config.dump_keep, dump))
        size_bytes = self.problems.guard("size unknown", lambda: place.size_of(dump))
        return DumpResult(str(dump), size_bytes or 0, self.problems.lines)

    def _write_rank(self) -> Path:
        request = self.request
        self.root.mkdir(parents=True, exist_ok=True)
        directory = place.open_rank_dir(self.root, request.report.step, request.rank, request.run_id)
        files = RankFiles(request, self.problems)
        lacks_space = self._lacks_space(files)
        size_bytes = files.size_bytes + (0 if lacks_space else tensor_bytes(shard.tensor for shard in request.state))
        with _progress(request, size_bytes) as progress:
            files.tell = progress.tell
            files.write(directory, set() if lacks_space else None)
        files.write_list(directory)
        directory.rename(directory.parent / rank_name(request.rank))
        sync_directory(directory.parent)
        return directory.parent

    def _lacks_space(self, files: RankFiles) -> bool:
        needed = files.size_bytes + tensor_bytes(shard.tensor for shard in self.request.state)
        free = place.free_bytes(self.root)
        if free < needed:
            self.problems.add_lack(_lack(needed, free, self.root))
        return free < needed

    def _write_manifest(self, dump: Path) -> None:
        with place.locked(self.root):
            if not (dump / MANIFEST).exists():
                who = "each rank" if self.why == self.request.why_alone else f"rank {self.request.rank}"
                problems = [f"{who} wrote its own part: {self.why}", *self.problems.lines]
                write_shared_files(self.request, dump, dump, Outcome(True, self.why, problems, []))
                place.point_latest(dump)


def _progress(request: DumpRequest, size_bytes: int) -> Progress:
    """Rank 0 says how far it is; the others take about as long."""
    what = "dump" if request.world_size == 1 else "dump, rank 0's part"
    return Progress(what, size_bytes, speaks=request.rank == 0)


def _rows(request: DumpRequest) -> list[bytes]:
    keys = (f"{shard.name} {shard.offsets}".encode() for shard in request.state)
    contents = digests([shard.tensor for shard in request.state])
    pairs = zip(keys, contents, strict=True)
    return [hashlib.blake2b(key, digest_size=KEY_BYTES).digest() + content for key, content in pairs]


def _lack(needed: int, free: int, root: Path) -> str:
    size = f"{human_size(needed)} needed, {human_size(free)} free"
    return f"dump without weights: {size} in {root}; free some space or set dump_dir"


def _name_ranks(ranks: list[int], num_ranks: int) -> str:
    if len(ranks) == num_ranks:
        return "all ranks"
    first = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {first}" if len(ranks) == 1 else f"ranks {first}"
