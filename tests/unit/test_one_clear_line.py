"""Bad input gets one line that names the option or the call, the value and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.cli import main
from ddp_nanguard.wrappers.clean_names import join


def _guard(**options: Any) -> NanGuard:
    model = nn.Linear(2, 1)
    return NanGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), **{"dump_dir": None, **options})


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "watch": ({"watch": ()}, "option watch=() looks at nothing; give some of state, input, forward"),
    "dump_dir": ({"dump_dir": ""}, "option dump_dir='' names no directory; give a path, or None for no dumps"),
    "history": ({"history": 10**12}, "option history=1000000000000 is out of range; give a number of steps up to"),
}
CALLS: dict[str, tuple[Callable[[NanGuard], object], str]] = {
    "steps": (lambda guard: guard.steps(None), "guard.steps(NoneType): give the loader"),  # type: ignore[arg-type]
    "text": (lambda guard: guard.watch(loss="x"), "guard.watch(loss=str) holds no loss; give a tensor, a number, or"),
    "object": (lambda guard: guard.watch(a={"b": object()}), "guard.watch(a.b=object) holds no loss"),
}


@pytest.mark.parametrize(("options", "text"), OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the text is compared below
        _guard(**options)
    assert str(refused.value).startswith(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("call", "text"), CALLS.values(), ids=CALLS)
def test_calls(call: Callable[[NanGuard], object], text: str) -> None:
    guard = _guard()
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the text is compared below
        call(guard)
    assert str(refused.value).startswith(text)
    guard.watch(loss=[], other=None)  # no losses of a kind that there may be
    guard.close()


def test_names_hold_no_control_characters() -> None:
    assert join("a", "b\x1b[31m\n\u202e") == r"a.b\x1b[31m\n\u202e"
    assert join("", "größe 1") == "größe 1"


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    guard = _guard(dump_dir=str(tmp_path / "runs" / "nan_dumps"), look_again=False)
    guard.watch(loss=torch.tensor(float("nan")))
    with pytest.raises(NonFiniteError):
        guard.check()
    return tmp_path / "runs" / "nan_dumps"


def test_list_finds_dumps_from_above_and_from_within(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (dump,) = dumps.glob("step-*")
    for directory in (dumps.parent, dumps, dump):
        assert main.main(["list", str(directory), "nowhere"]) == 0
        told = capsys.readouterr()
        assert dump.name in told.out
        assert told.err == "ddp-nanguard: nowhere does not exist\n"
    assert main.main(["list", "nowhere"]) == 2
    assert "nowhere does not exist: nothing went bad there yet" in capsys.readouterr().err


def test_explain_of_a_rank_that_is_not_there(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (dump,) = dumps.glob("step-*")
    assert main.main(["explain", str(dump), "--rank", "9"]) == 2
    assert "has no rank 9" in capsys.readouterr().err
