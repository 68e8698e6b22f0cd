"""Jobs that are not the usual loop: differing options, ranks that never step, closures, two optimizers, an EMA."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.dump import open_dump
from ddp_nanguard.fault import policy
from ddp_nanguard.report.types import CALLS_ONLY
from tests.ranks import run_ranks
from tests.ranks.small import NAN, rows, run_step, sgd, small_model


def _stopped(run: Callable[[], object]) -> tuple[str, dict[str, Any]] | None:
    try:
        run()
    except NonFiniteError as error:
        return str(error), error.report.to_dict()
    return None


def _refused(build: Callable[[], Any]) -> str | None:
    try:
        guard = build()
    except ValueError as error:
        return str(error)
    guard.close()
    return None


# -- options that differ ----------------------------------------------------------------------------------------------


def _differing(rank: int, world_size: int) -> tuple[str | None, str | None]:
    model = small_model()
    optimizer = sgd(model)
    refused = _refused(lambda: NanGuard(model, optimizer, dump_dir=None, max_skips=3 + rank))
    again = _refused(lambda: NanGuard(model, optimizer, dump_dir=None, max_skips=3))
    return refused, again


def test_options_that_differ_between_ranks_are_refused_everywhere() -> None:
    for refused, again in run_ranks(_differing):
        assert refused is not None
        assert "max_skips" in refused
        assert "3" in refused
        assert "4" in refused
        assert again is None, "the refusal left something behind"


def _own_dump_dir(rank: int, world_size: int, root: str) -> dict[str, Any]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddp_nanguard.build").addHandler(handler)
    model = small_model()
    optimizer = sgd(model)
    refused = _refused(lambda: NanGuard(model, optimizer, dump_dir=None if rank else root))
    also = _refused(lambda: NanGuard(model, optimizer, dump_dir=f"{root}/{rank}", max_skips=rank))
    guard = NanGuard(model, optimizer, dump_dir=f"{root}/12:00:0{rank}", timeout_s=5)
    told_before = list(told)
    try:
        run_step(guard, optimizer, rows(bad=rank == 1))
    except NonFiniteError as error:
        return {"refused": refused, "also": also, "told": told_before, "path": error.report.dump_path}
    raise AssertionError("nothing went bad")


def test_a_dump_dir_with_a_time_stamp_is_that_of_rank_0_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(_own_dump_dir, root=str(tmp_path))
    directory = tmp_path / "12:00:00"
    line = f"option dump_dir differs between ranks: {str(directory)!r}, that of rank 0, is taken for all"
    assert (first["told"], second["told"]) == ([line], [])
    assert first["path"] == second["path"] == str(directory / "step-00000000")
    assert sorted(path.name for path in (directory / "step-00000000").glob("rank-*")) == ["rank-00000", "rank-00001"]
    assert list(tmp_path.iterdir()) == [directory], "no other rank has made a directory of its own"
    assert (
        first["refused"] == second["refused"]
        and f"dump_dir={str(tmp_path)!r} against dump_dir=None" in first["refused"]
    )
    assert first["also"] == second["also"] and "max_skips=0 against max_skips=1" in first["also"]


def _invalid_on_one(rank: int, world_size: int) -> str | None:
    model = small_model()
    options = {"on_fault": "explode"} if rank == 1 else {}
    return _refused(lambda: NanGuard(model, sgd(model), dump_dir=None, timeout_s=5, **options))


def test_an_invalid_option_on_one_rank_is_refused_on_all() -> None:
    for refused in run_ranks(_invalid_on_one):
        assert refused is not None
        assert "on_fault" in refused
        assert "explode" in refused


# -- ranks that never step --------------------------------------------------------------------------------------------


def _with_spectator(rank: int, world_size: int) -> Any:
    workers = dist.new_group([0, 1])
    if rank == 2:
        return "watched"
    model = DistributedDataParallel(nn.Linear(4, 2), process_group=workers)
    optimizer = sgd(model)
    guard = NanGuard(model, optimizer, dump_dir=None, group=workers, timeout_s=10)

    def train() -> None:
        for step in range(4):
            divisor = 0.0 if rank == 1 and step == 2 else 1.0
            guard(torch.zeros(2, 4) / divisor).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    stopped = _stopped(train)
    guard.close()
    return stopped


def test_a_world_with_ranks_that_never_step() -> None:
    first, second, third = run_ranks(_with_spectator, world_size=3)
    assert third == "watched"
    assert first == second
    _, report = first
    assert (report["step"], report["origin"]["rank"], report["world_size"]) == (2, 1, 2)


# -- closures ---------------------------------------------------------------------------------------------------------


def _with_closure(rank: int, world_size: int, bad: bool) -> Any:
    model = small_model()
    optimizer = sgd(model)
    guard = NanGuard(model, optimizer, dump_dir=None, timeout_s=10)
    before: list[torch.Tensor] = []

    def train() -> None:
        for step in range(3):
            before[:] = [parameter.detach().clone() for parameter in model.parameters()]
            divisor = 0.0 if bad and rank == 1 and step == 1 else 1.0

            def closure(divisor: float = divisor) -> torch.Tensor:
                optimizer.zero_grad()
                loss = guard(torch.ones(2, 4) / divisor).sum()
                loss.backward()
                return loss

            optimizer.step(closure)

    stopped = _stopped(train)
    unchanged = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    step = guard.step
    guard.close()
    return stopped, unchanged, step


def test_a_closure_is_judged_when_it_has_returned() -> None:
    for stopped, unchanged, step in run_ranks(_with_closure, bad=True):
        assert stopped is not None
        assert stopped[1]["step"] == 1
        assert stopped[1]["origin"]["rank"] == 1
        assert unchanged
        assert step == 1
    for stopped, unchanged, step in run_ranks(_with_closure, bad=False):
        assert stopped is None
        assert not unchanged
        assert step == 3


# -- refusals ---------------------------------------------------------------------------------------------------------


def _refusals(rank: int, world_size: int) -> dict[str, str | None]:
    model = small_model()
    optimizer = sgd(model)
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None)
    refusals = {"twice": _refused(lambda: NanGuard(model, optimizer, dump_dir=None))}
    guard.close()
    builds = {
        "lbfgs": lambda: NanGuard(model, torch.optim.LBFGS(model.parameters()), dump_dir=None),
        "foreign": lambda: NanGuard(model, foreign, dump_dir=None),
        "unknown": lambda: NanGuard(model, optimizer, dump_dir=None, on_nan="stop"),
        "value": lambda: NanGuard(model, optimizer, dump_dir=None, on_fault="explode"),
        "data parallel": lambda: NanGuard(nn.DataParallel(nn.Linear(2, 2)), optimizer, dump_dir=None),
        "no module": lambda: NanGuard(print, optimizer, dump_dir=None),
        "fine again": lambda: NanGuard(model, optimizer, dump_dir=None),
    }
    return refusals | {name: _refused(build) for name, build in builds.items()}


def test_bad_input_is_refused_with_the_remedy() -> None:
    first, second = run_ranks(_refusals)
    assert first == second
    wanted = {
        "twice": ["guard", "close"],
        "lbfgs": ["LBFGS", "closure"],
        "foreign": ["optimizer", "param"],
        "unknown": ["on_nan", "on_fault"],
        "value": ["on_fault", "explode", "stop", "skip", "warn"],
        "data parallel": ["DataParallel", "DistributedDataParallel"],
        "no module": ["Module"],
    }
    for name, words in wanted.items():
        assert first[name] is not None, name
        assert [word for word in words if word not in first[name]] == [], (name, first[name])
    assert first["fine again"] is None, "a refusal left something behind"


def _environment(rank: int, world_size: int) -> Any:
    model = small_model()
    optimizer = sgd(model)
    return _refused(lambda: NanGuard(model, optimizer, dump_dir=None, on_fault="stop"))


def test_an_invalid_environment_value_lists_the_valid_ones() -> None:
    for refused in run_ranks(_environment, env={"NANGUARD_ON_FAULT": "explode"}):
        for word in ("NANGUARD_ON_FAULT", "explode", "stop", "skip", "warn"):
            assert word in refused


# -- several optimizers, an EMA ---------------------------------------------------------------------------------------


def _two_optimizers(rank: int, world_size: int, bad_step: int | None) -> Any:
    model = small_model()
    body, head = list(model.module[0].parameters()), list(model.module[2].parameters())
    optimizers = [torch.optim.SGD(body, lr=0.1), torch.optim.Adam(head, lr=0.01)]
    guard = NanGuard(model, optimizers, dump_dir=None, timeout_s=10)

    def train() -> None:
        for step in range(4):
            if step == bad_step and rank == 1:
                optimizers[1].param_groups[0]["lr"] = NAN
            guard(torch.ones(2, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()

    stopped = _stopped(train)
    step = guard.step
    if stopped is None:
        guard.close()
    return stopped, step


def test_two_optimizers_share_one_verdict_per_step() -> None:
    assert run_ranks(_two_optimizers, bad_step=None) == [(None, 4)] * 2


def test_the_second_optimizers_hyper_parameters_are_named() -> None:
    first, second = run_ranks(_two_optimizers, bad_step=2)
    assert first == second
    (_, report), step = first
    origin = report["origin"]
    assert (origin["phase"], origin["rank"], origin["step"], step) == ("optimizer", 1, 2, 2)
    assert origin["slot"] == "optimizer1.g0.lr"


def _alternating(rank: int, world_size: int) -> Any:
    """As in a GAN: each optimizer steps after a backward of its own, so each step is judged."""
    model = small_model()
    body, head = list(model.module[0].parameters()), list(model.module[2].parameters())
    optimizers = [torch.optim.SGD(body, lr=0.1), torch.optim.SGD(head, lr=0.1)]
    guard = NanGuard(model, optimizers, dump_dir=None, timeout_s=10)
    for _ in range(3):
        for optimizer in optimizers:
            guard(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            model.zero_grad()
    guard.close()
    return guard.step


def test_optimizers_that_alternate_are_judged_each() -> None:
    steps = run_ranks(_alternating)
    assert steps[0] == steps[1]
    assert steps[0] >= 6


def _with_ema(rank: int, world_size: int, bad: bool) -> Any:
    model = small_model()
    ema = copy.deepcopy(model.module)
    optimizer = sgd(model)
    guard = NanGuard(model, optimizer, dump_dir=None, timeout_s=10)
    guard.register(ema=ema)

    def train() -> None:
        for step in range(5):
            guard(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            decay = 0.0 if bad and rank == 1 and step == 2 else 0.9
            with torch.no_grad():
                for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
                    mine.mul_(0.9).add_(theirs, alpha=0.1).mul_(decay).div_(decay)

    stopped = _stopped(train)
    if stopped is None:
        guard.close()
    return stopped


def test_a_registered_copy_is_watched() -> None:
    assert run_ranks(_with_ema, bad=False) == [None, None]
    first, second = run_ranks(_with_ema, bad=True)
    assert first == second
    _, report = first
    assert report["origin"]["phase"] == "state"
    assert report["origin"]["rank"] == 1
    assert report["origin"]["slot"] == "ema.0.weight"
    assert report["step"] == 3
    assert report["nonfinite_state"] == ["ema.0.weight", "ema.0.bias", "ema.2.weight", "ema.2.bias"]


class _Unsaved:
    """A registered object whose state cannot be had."""

    def __init__(self, raises: bool) -> None:
        self._raises = raises

    def state_dict(self) -> dict[str, Any]:
        if self._raises:
            raise RuntimeError("not now")
        return {"count": 3}


def _with_unsaved(rank: int, world_size: int, dump_dir: str, timeout_s: float = 10.0) -> Any:
    model = small_model()
    optimizer = sgd(model)
    guard = NanGuard(model, optimizer, dump_dir=dump_dir, timeout_s=timeout_s)
    guard.register(schedule=_Unsaved(raises=rank == 1))

    def train() -> None:
        for step in range(3):
            (guard(torch.ones(2, 4)).sum() * (NAN if (rank, step) == (1, 2) else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()

    try:
        train()
    except NonFiniteError as error:
        error.barrier()  # as at the end of a process that does not catch it
        return str(error), error.report.to_dict()
    raise AssertionError("no fault")


def test_a_registered_object_that_raises_does_not_replace_the_fault(tmp_path: Path) -> None:
    first, second = run_ranks(_with_unsaved, dump_dir=str(tmp_path))
    assert first == second
    assert first[1]["origin"]["rank"] == 1 and first[1]["notes"] == [CALLS_ONLY]
    dump = open_dump(first[1]["dump_path"])
    assert dump.ranks == [0, 1]
    assert dump.plain_state()["registered"]["schedule"] == {"count": 3}, "what rank 0 holds"


def _without_request(rank: int, world_size: int, dump_dir: str) -> Any:
    def forbidden(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a collective that meets those of the peers' dump")

    def defect(*arguments: Any) -> Any:
        dist.all_reduce = forbidden
        raise KeyError("defect")

    kept = policy.dump_request, dist.all_reduce
    if rank == 1:
        policy.dump_request = defect
    try:
        return _with_unsaved(rank, world_size, dump_dir, timeout_s=1.0)
    finally:
        policy.dump_request, dist.all_reduce = kept


def test_a_defect_on_the_way_to_the_dump_does_not_replace_the_fault(tmp_path: Path) -> None:
    (text, report), (other_text, other) = run_ranks(_without_request, dump_dir=str(tmp_path))
    assert text.splitlines()[0] == other_text.splitlines()[0]
    assert report["origin"] == other["origin"] and report["origin"]["rank"] == 1
    assert other["notes"] == [CALLS_ONLY, "dump: this rank has no part of it: KeyError: 'defect'"]
    assert open_dump(report["dump_path"]).ranks == [0]


class _Tied(nn.Module):
    """Forty layers that share one weight, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a_long_name_of_a_stack = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(40))
        for layer in self.a_long_name_of_a_stack:
            layer.weight = self.a_long_name_of_a_stack[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.a_long_name_of_a_stack:
            x = layer(x)
        return x


def _with_many_suspects(rank: int, world_size: int) -> Any:
    torch.manual_seed(0)
    net = _Tied()
    weight = net.a_long_name_of_a_stack[0].weight
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = NanGuard(model, optimizer, dump_dir=None, timeout_s=10, layers="every")

    def train() -> None:
        for step in range(3):
            handle = weight.register_hook(lambda gradient: gradient * NAN) if (rank, step) == (1, 2) else None
            guard(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if handle is not None:
                handle.remove()

    return _stopped(train)


def test_an_origin_with_more_suspects_than_fit_stays_the_origin() -> None:
    first, second = run_ranks(_with_many_suspects)
    assert first == second
    origin = first[1]["origin"]
    assert (origin["rank"], origin["step"], origin["phase"]) == (1, 2, "backward")
    assert origin["slot"] == "a_long_name_of_a_stack.0.weight"
    assert origin["suspects"][0] == "a_long_name_of_a_stack.0" and origin["suspects"][-1] == "36 more"
