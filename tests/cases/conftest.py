"""Prints, for the public failure cases, how many ran, passed and are not here, by group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.cases.harness import Launch, launched
from tests.cases.not_here import GROUPS, NOT_HERE, id_of

HERE = "tests/cases/"


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    outcomes: dict[str, set[str]] = defaultdict(set)
    for outcome in ("passed", "failed", "error", "skipped", "xfailed", "xpassed"):
        for report in terminalreporter.stats.get(outcome, []):
            node = getattr(report, "nodeid", "")
            name = id_of(node.rpartition("::")[2]) if HERE in node else None
            if name is not None:
                outcomes[name].add(outcome)
    if not outcomes:
        return
    terminalreporter.section("public failure cases")
    rows = [(f"{group}  {title}", _counts(group, outcomes)) for group, title in GROUPS.items()]
    total = [sum(column) for column in zip(*(counts for _, counts in rows), strict=True)]
    terminalreporter.write_line(f"{'':40}{'run':>8}{'passed':>8}{'xfailed':>8}{'not here':>10}")
    for title, counts in [*rows, ("all", total)]:
        run, passed, expected, absent = counts
        terminalreporter.write_line(f"{title:40}{run:8}{passed:8}{expected:8}{absent:10}")


def _counts(group: str, outcomes: dict[str, set[str]]) -> list[int]:
    """Cases run, passed in every test of theirs, with a known wrong answer, and not here."""
    mine = [found for name, found in outcomes.items() if name.startswith(group)]
    return [
        len(mine),
        sum(found == {"passed"} for found in mine),
        sum("xfailed" in found for found in mine),
        sum(name.startswith(group) for name in NOT_HERE),
    ]


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """How the cases of the test's module ended, in one launch."""
    return launched(request.module, tmp_path_factory.mktemp("cases"))


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """The replay of a sharded dump makes a group of this process alone."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
