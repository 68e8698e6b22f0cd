"""A fault at any place of any module tree is named exactly; a clean tree is left alone."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.report.types import FaultReport, Site
from tests.properties.nets import WIDTH, Net
from tests.properties.trees import ACCUMULATION, ITEMS, Expected, Part, Trap, Walk, trapped_trees, trees
from tests.training import Loop

ROWS = 4

# what torch says of a reentrant checkpoint in another one, whose first run has no graph
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
REPEATABLE = settings(
    deadline=None,
    derandomize=True,
    database=None,  # no directory in the repository
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)


def _report(tree: Part, trap: Trap | None) -> FaultReport | None:
    torch.manual_seed(0)
    model = Net(tree)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = NanGuard(model, optimizer, dump_dir=None)
    loop = Loop(model, optimizer, _mean_square, guard=guard, accumulation=ACCUMULATION)
    armed = [trap if trap is not None and trap.item == index else None for index in range(ITEMS)]
    error = loop.until_fault([(torch.randn(ROWS, WIDTH), each) for each in armed])
    with contextlib.suppress(NonFiniteError):
        guard.close()
    return None if error is None else error.report


def _mean_square(guard: Any, batch: tuple[torch.Tensor, Trap | None]) -> torch.Tensor:
    return guard(*batch).square().mean()  # type: ignore[no-any-return]  # the guard returns Any


def _said(site: Site, expected: Expected) -> Expected:
    inline_code = (
        None
        if site.inline_code is None
        else (str(site.inline_code.layer), site.inline_code.after, site.inline_code.before)
    )
    if site.phase == "backward" and inline_code is not None and expected.inline_code is not None:
        inline_code = (
            inline_code[0],
            *expected.inline_code[1:],
        )  # where in the order of gradients has no name of its own
    slot = None if expected.slot is None else site.slot
    return Expected(str(site.phase), site.layer or "", site.call, slot, site.kind, inline_code, site.suspects)


@pytest.mark.timeout(300)  # a failure is shrunk first
@settings(REPEATABLE, max_examples=80)
@given(trapped_trees())
def test_the_origin_is_named_exactly(drawn: tuple[Part, Trap]) -> None:
    _assert_named(*drawn)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@settings(REPEATABLE, max_examples=600)
@given(trapped_trees())
def test_so_it_is_in_many_more_trees(drawn: tuple[Part, Trap]) -> None:
    _assert_named(*drawn)


def _assert_named(tree: Part, trap: Trap) -> None:
    report, expected = _report(tree, trap), Walk(tree).expected(trap)
    event(f"{expected.phase} {trap.place}" if expected is not None else "quiet")
    if expected is None:
        assert report is None
        return
    assert report is not None and report.origin is not None
    assert _said(report.origin, expected) == expected
    assert (report.origin.step, report.origin.micro_batch) == divmod(trap.item, ACCUMULATION)


@pytest.mark.timeout(300)
@settings(REPEATABLE, max_examples=60)
@given(trees())
def test_a_clean_tree_is_left_alone(tree: Part) -> None:
    assert _report(tree, None) is None
